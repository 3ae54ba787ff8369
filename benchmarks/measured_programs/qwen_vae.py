"""Qwen-Image's VAE, decoding and encoding, as users of ComfyUI and InvokeAI measured it: memory beside theirs.

    python benchmarks/measured_programs/qwen_vae.py [--only comfyui|invokeai] [--longest PIXELS] [--json FILE]

InvokeAI's rows need diffusers. Weights are virtual.

Sources:

- ComfyUI, pull request 15221 (github.com/Comfy-Org/ComfyUI), 2 August 2026: Radeon RX 9060 XT, bfloat16, one image of
  1024 x 1024, whole and in tiles. "MB" are MiB (the weights are given as 242 MB), and the figures are the peak of
  `torch.cuda.max_memory_allocated` above what stood before the call. The latents to decode stood there, the image to
  encode did not. `Network` below is the VAE as ComfyUI's ``comfy/ldm/wan/vae.py`` ran it on one frame at that time, in
  code of our own.
- InvokeAI, pull request 9305 (github.com/invoke-ai/InvokeAI), comment of 30 June 2026: GeForce RTX 4090, torch
  2.7.1+cu128, diffusers 0.37.0 (what InvokeAI required on that day), float16. Their script
  ``scripts/calibrate_qwen_vae_working_memory.py`` makes one cold call of `AutoencoderKLQwenImage` a process: peak of
  `max_memory_allocated`, weights included, and growth of `max_memory_reserved` over what was reserved before the call.

NOTE [One model, two programs]
Both run the same 127 M parameters. That diffusers' code comes within 2 % of ComfyUI's figure for decoding (and 17 % for
encoding) is chance, for the peaks have nothing in common:

- ComfyUI drops the two frames of zeros before a single one and multiplies by the last slice of the causal filters.
  diffusers pads to three frames, and keeps the last features of each convolution for a second frame.
- ComfyUI switches cuDNN (on that card: MIOpen) off on AMD cards since RDNA 3, so torch's own kernels compute, which lay
  out columns. The peak of encoding is 96 channels x 9 columns and three features; that of decoding 192 x 9 columns, in
  the convolution after the last doubling. With cuDNN the same code takes 966 and 1,261 MiB.
- diffusers' peak is a convolution over padded features, with 771 MiB of cuDNN's workspace at 1024 x 1024.

There is no Radeon among the virtual GPUs, and none is needed: torch's own kernels allocate the same on any card. Only
the BLAS library's workspace differs (32 MiB in ROCm), which in their figures stood before the call.

NOTE [The norm]
From 0.38 on, diffusers normalises half precision in float32. The peak of what is allocated stays, but the cache holds
other blocks: at 1024 x 1024, encoding reserves 3.24 GiB instead of 2.87 (theirs: 2.85). So the norm is put back as it
was, whatever version is installed.

NOTE [Slack]
A block that is split leaves a rest of more than 1 MiB or none, and what is not split off counts as allocated. Which
block serves a request depends on what ran before. Two of the tiles are off by 0.3 and 0.4 MiB, not more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

from vramfit.trace import reserved_bar
from vramfit.units import GIB, MIB
from vramfit.virtual.gpu import VirtualGPU

CARD = "RTX 4090"
WIDTHS = (96, 192, 384, 384)
"""Channels at the image's size, a half, a quarter and an eighth of it."""

LATENTS = 16
DOWNSCALE = 8

COMFYUI = {
    ("decode", 1024): 4140.5,
    ("decode", 512): 1035.1,
    ("decode", 256): 258.8,
    ("encode", 1024): 2310.2,
    ("encode", 512): 578.0,
    ("encode", 256): 144.5,
}
"""MiB by operation and pixels on a side: the whole image, or one tile of it."""

INVOKEAI = {
    ("decode", 512, 512): (1.274, 1.311),
    ("decode", 768, 768): (2.563, 2.992),
    ("decode", 832, 1248): (4.331, 5.211),
    ("decode", 1024, 1024): (4.369, 5.254),
    ("decode", 1088, 1920): (8.468, 10.408),
    ("decode", 1280, 1280): (6.693, 8.188),
    ("decode", 1536, 1024): (6.434, 7.857),
    ("decode", 1536, 1536): (9.532, 11.736),
    ("decode", 1792, 1792): (12.884, 15.949),
    ("decode", 2048, 2048): (16.754, 20.799),
    ("encode", 512, 512): (0.900, 0.711),
    ("encode", 768, 768): (1.724, 1.594),
    ("encode", 832, 1248): (2.854, 2.824),
    ("encode", 1024, 1024): (2.879, 2.848),
    ("encode", 1088, 1920): (5.498, 5.672),
    ("encode", 1280, 1280): (4.364, 4.459),
    ("encode", 1536, 1024): (4.199, 4.281),
    ("encode", 1536, 1536): (6.179, 6.396),
}
"""GiB by operation, height and width: peak allocated, and growth of what is reserved. Two more encodings of theirs are
not in the copy of the comment that we have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one of InvokeAI's calls takes, in bytes.

    Attributes:
        allocated: peak, weights included.
        growth: of what is reserved, over what was reserved before the call.
        below, above: error bar of the growth.
    """

    allocated: int
    growth: int
    below: int
    above: int


def main(arguments: list[str] | None = None) -> int:
    """Print a row a call; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["comfyui", "invokeai"], help="figures of this source")
    parser.add_argument("--longest", type=int, default=2048, metavar="PIXELS", help="no larger images")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--row",
        nargs=4,
        metavar=("SOURCE", "OPERATION", "HEIGHT", "WIDTH"),
        help="print one prediction for accuracy.py",
    )
    options = parser.parse_args(arguments)
    if options.row:
        print(json.dumps(row_of(*options.row)))
        return 0
    results: dict[str, Any] = {}
    if options.only != "invokeai":
        results["comfyui"] = list(comfyui_rows(options.longest))
    if options.only != "comfyui":
        results["invokeai"] = list(invokeai_rows(options.longest))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def row_of(source: str, operation: str, height: str, width: str) -> dict[str, int]:
    """One prediction: what is allocated for ComfyUI, whose programs take no cuDNN, and the growth for InvokeAI."""
    if source == "comfyui":
        return {"predicted": comfyui(operation, int(height)), "below": 0, "above": 0}
    found = invokeai(operation, int(height), int(width))
    return {"predicted": found.growth, "below": found.below, "above": found.above}


def comfyui_rows(longest: int) -> Iterator[dict[str, Any]]:
    """Run and print the calls of ComfyUI."""
    print("| ComfyUI | pixels | published, MiB | predicted, MiB | |\n|---|---|---:|---:|---:|")
    for (operation, pixels), published in COMFYUI.items():
        if pixels > longest:
            continue
        found = comfyui(operation, pixels) / MIB
        error = found / published - 1
        print(f"| {operation} | {pixels} | {published:,.1f} | {found:,.1f} | {error:+.2%} |", flush=True)
        yield {"operation": operation, "pixels": pixels, "published": published, "predicted": found}


def invokeai_rows(longest: int) -> Iterator[dict[str, Any]]:
    """Run and print the calls of InvokeAI."""
    print("\n| InvokeAI | pixels | allocated, GiB | predicted | growth, GiB | predicted | | within the bar |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for (operation, height, width), (allocated, growth) in INVOKEAI.items():
        if max(height, width) > longest:
            continue
        found = invokeai(operation, height, width)
        inside = found.growth - found.below <= growth * GIB <= found.growth + found.above
        print(
            f"| {operation} | {height} x {width} | {allocated:.3f} | {found.allocated / GIB:.3f} "
            f"| {growth:.3f} | {found.growth / GIB:.3f} | {found.growth / (growth * GIB) - 1:+.1%} "
            f"| {'yes' if inside else 'no'} |",
            flush=True,
        )
        yield {"operation": operation, "height": height, "width": width, "inside": inside} | asdict(found)


# -- the calls -----------------------------------------------------------------------------------------------


def comfyui(operation: str, pixels: int) -> int:
    """Bytes that one call of ComfyUI's takes above what stood before it, the BLAS library's workspace included."""
    with VirtualGPU(CARD), torch.inference_mode(), torch.backends.cudnn.flags(enabled=False):
        model = Network().to("cuda", torch.bfloat16)
        call: Callable[[Tensor], Tensor] = model.decode if operation == "decode" else model.encode
        side = pixels // DOWNSCALE
        for _ in range(2):  # the first call leaves the workspace
            before = torch.cuda.memory_allocated()
            if operation == "decode":
                given = torch.zeros(1, LATENTS, 1, side, side).to("cuda", torch.bfloat16)
                before = torch.cuda.memory_allocated()  # the sampler's latents are on the card already
            else:
                given = torch.zeros(1, 3, 1, pixels, pixels).to(torch.bfloat16).to("cuda")
            torch.cuda.reset_peak_memory_stats()
            call(given).to("cpu", torch.float32)
            del given
        return torch.cuda.max_memory_allocated() - before


def invokeai(operation: str, height: int, width: int) -> Taken:
    """What one cold call of InvokeAI's takes."""
    try:
        from diffusers import AutoencoderKLQwenImage
    except ImportError:
        sys.exit("the network is diffusers', which is not installed\nTry: pip install diffusers")
    with VirtualGPU(CARD) as gpu, torch.inference_mode():
        model: Any = AutoencoderKLQwenImage()
        for module in model.modules():
            if type(module).__name__ == "QwenImageRMS_norm":
                module.forward = partial(normalized, module)
        model.to(torch.float16).to("cuda")
        shape = (height, width) if operation == "encode" else (height // DOWNSCALE, width // DOWNSCALE)
        channels = 3 if operation == "encode" else LATENTS
        given = torch.randn(1, channels, 1, *shape, device="cuda", dtype=torch.float16)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        if operation == "decode":
            model.decode(given, return_dict=False)
        else:
            model.encode(given).latent_dist.mode()
        allocated = torch.cuda.max_memory_allocated()
        growth = torch.cuda.max_memory_reserved() - before
    bar = reserved_bar(gpu.run.trace, 0, gpu.run.estimates)
    return Taken(allocated=allocated, growth=growth, below=bar.below, above=bar.above)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """diffusers' norm before 0.38: see NOTE [The norm]."""
    return normalize(x, dim=1 if norm.channel_first else -1) * norm.scale * norm.gamma + norm.bias


# -- the network, as ComfyUI runs it on one frame ------------------------------------------------------------


class CausalConv(nn.Conv3d):
    """A convolution over this frame and two before; of one frame alone only the last filters see anything."""

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, 1, height, width) in and out."""
        return self._conv_forward(x, self.weight[:, :, -1:], self.bias)


def causal(inputs: int, outputs: int, size: int = 3) -> CausalConv:
    """A causal convolution that keeps height and width."""
    return CausalConv(inputs, outputs, size, padding=(0, size // 2, size // 2))


class Norm(nn.Module):
    """Each pixel's channels, brought to one length and scaled."""

    def __init__(self, channels: int, frames: bool = True) -> None:
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * (2 + frames)))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape with channels second."""
        return normalize(x, dim=1) * self.scale * self.gamma


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(Norm(inputs), nn.SiLU(), causal(inputs, outputs)),
            *(Norm(outputs), nn.SiLU(), causal(outputs, outputs)),
        )
        self.shortcut = causal(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, 1, height, width)."""
        return self.layers(x) + self.shortcut(x)


class Attention(nn.Module):
    """Self-attention of one head over the pixels of the frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = Norm(channels, frames=False)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.to_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, 1, height, width)."""
        frame = x.squeeze(2)
        parts = self.to_qkv(self.norm(frame)).chunk(3, dim=1)
        q, k, v = (part.flatten(2).unsqueeze(1).transpose(2, 3).contiguous() for part in parts)
        mixed = scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(frame.shape)
        return self.to_out(mixed).unsqueeze(2) + x


class Doubling(nn.Module):
    """Twice the height and width with half the channels."""

    def __init__(self, channels: int, frames: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"),
            nn.Conv2d(channels, channels // 2, 3, padding=1),
        )
        self.time = nn.Conv3d(channels, 2 * channels, (3, 1, 1)) if frames else None  # not for one frame

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, 1, height, width)."""
        return self.layers(x.squeeze(2)).unsqueeze(2)


class Halving(nn.Module):
    """Half the height and width."""

    def __init__(self, channels: int, frames: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)
        self.time = nn.Conv3d(channels, channels, (3, 1, 1)) if frames else None  # not for one frame

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, 1, height, width)."""
        return self.conv(pad(x.squeeze(2), (0, 1, 0, 1))).unsqueeze(2)


def middle(channels: int) -> nn.Sequential:
    """What stands at the smallest size."""
    return nn.Sequential(Residual(channels, channels), Attention(channels), Residual(channels, channels))


def head(channels: int, outputs: int) -> nn.Sequential:
    """The last convolution."""
    return nn.Sequential(Norm(channels), nn.SiLU(), causal(channels, outputs))


class Encoder(nn.Sequential):
    """Image to mean and variance of the latents."""

    def __init__(self) -> None:
        stages: list[nn.Module] = []
        for at, (inputs, outputs) in enumerate(pairwise((WIDTHS[0], *WIDTHS))):
            stages += [Residual(inputs, outputs), Residual(outputs, outputs)]
            if at < len(WIDTHS) - 1:
                stages.append(Halving(outputs, frames=at > 0))
        super().__init__(
            *(causal(3, WIDTHS[0]), *stages),
            *(middle(WIDTHS[-1]), head(WIDTHS[-1], 2 * LATENTS)),
        )


class Decoder(nn.Module):
    """Latents to image."""

    def __init__(self) -> None:
        super().__init__()
        wide = WIDTHS[::-1]
        self.first = nn.Sequential(causal(LATENTS, wide[0]), middle(wide[0]))
        stages: list[nn.Module] = []
        for at, (inputs, outputs) in enumerate(pairwise((wide[0], *wide))):
            stages.append(Residual(inputs // 2 if at else inputs, outputs))
            stages += [Residual(outputs, outputs), Residual(outputs, outputs)]
            if at < len(wide) - 1:
                stages.append(Doubling(outputs, frames=at < 2))
        self.stages = nn.Sequential(*stages)
        self.head = head(wide[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        """(images, latents, 1, height, width); the features of the smallest size live to the end, as in ComfyUI."""
        features = self.first(x)
        return self.head(self.stages(features))


class Network(nn.Module):
    """The whole VAE, without a cache of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.after = causal(2 * LATENTS, 2 * LATENTS, 1)
        self.before = causal(LATENTS, LATENTS, 1)
        self.decoder = Decoder()

    def encode(self, image: Tensor) -> Tensor:
        """(1, 3, 1, height, width) to (1, 16, 1, height / 8, width / 8)."""
        return self.after(self.encoder(image)).chunk(2, dim=1)[0]

    def decode(self, latents: Tensor) -> Tensor:
        """The other way."""
        return self.decoder(self.before(latents))


if __name__ == "__main__":
    sys.exit(main())
