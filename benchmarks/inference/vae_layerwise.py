"""The decoder of a latent diffusion model by layer-wise chunks, beside diffusers' own slicing and tiling.

    python benchmarks/inference/vae_layerwise.py [--json FILE] [--no-errors]

Bytes and simulated times are those of a virtual RTX 4090; the network is Stable Diffusion's autoencoder (block widths
128, 256, 512, 512, as diffusers makes it, with random weights), latents are one image of 64 x 64 and 128 x 128. Weights
of the whole autoencoder are there in every row. FLOPs are those that `torch.utils.flop_counter` counts.

Errors are of the same network at a quarter of the width, on the CPU, for latents of 24 x 24 with diffusers' tiles of
16: the largest difference from the whole run in float64, as a part of the largest output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vramfit.inference.layerwise import ChunkHeight, ChunkStore, run_layerwise
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
CARD = "RTX 4090"
GOAL_RESERVED, GOAL_FLOPS = 0.6, 1.05
"""At most so much of the plain run's reserved bytes, and of its FLOPs."""

GOAL_ERRORS = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode.

    Attributes:
        prepare: what is switched on in the autoencoder.
        decode: the image of latents.
    """

    name: str
    prepare: Callable[[Any], None]
    decode: Callable[[Any, torch.Tensor], torch.Tensor]
    ours: bool = False


def plainly(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = vae.decode(latents).sample
    return found


def by_layers(height: ChunkHeight, store: ChunkStore = ChunkStore.DEVICE) -> Callable[..., torch.Tensor]:
    def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run_layerwise(vae.decode, (latents,), rows=height, store=store).sample
        return found

    return decode


def ways(sixteen: int) -> list[Way]:
    """The ways that are compared; `sixteen` is a chunk's size that stands for 16 MiB."""
    nothing: Callable[[Any], None] = lambda _: None  # noqa: E731
    return [
        Way(name="plain", prepare=nothing, decode=plainly),
        Way(name="diffusers, enable_slicing", prepare=lambda vae: vae.enable_slicing(), decode=plainly),
        Way(name="diffusers, enable_tiling", prepare=lambda vae: vae.enable_tiling(), decode=plainly),
        *(
            Way(
                name=f"layer-wise, {size // (sixteen // 16)} MiB",
                prepare=nothing,
                decode=by_layers(ChunkHeight(bytes=size)),
                ours=True,
            )
            for size in (4 * sixteen, sixteen, sixteen // 4)
        ),
        Way(
            name="layer-wise, 16 MiB, kept on the host",
            prepare=nothing,
            decode=by_layers(ChunkHeight(bytes=sixteen), ChunkStore.HOST),
            ours=True,
        ),
    ]


def autoencoder(width: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import AutoencoderKL
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        layers_per_block=2,
        latent_channels=4,
        sample_size=512,
    ).eval()


@dataclass(frozen=True, kw_only=True)
class VaeRow:
    """What one way takes on the card."""

    latents: int
    dtype: str
    way: str
    reserved_bytes: int
    allocated_bytes: int
    milliseconds: float
    flops: int


def on_card(way: Way, size: int, dtype: torch.dtype) -> VaeRow:
    """Decode once on a fresh virtual card."""
    with VirtualGPU(CARD, alloc_conf="", profile="none"), torch.no_grad():
        vae = autoencoder(128)
        with _quietly():
            vae = vae.to(dtype)
        vae = vae.cuda()
        way.prepare(vae)
        latents = torch.zeros(1, 4, size, size, dtype=dtype, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        with FlopCounterMode(display=False) as counter:
            way.decode(vae, latents)
        end.record()
        torch.cuda.synchronize()
        return VaeRow(
            latents=size,
            dtype=str(dtype).removeprefix("torch."),
            way=way.name,
            reserved_bytes=torch.cuda.max_memory_reserved(),
            allocated_bytes=torch.cuda.max_memory_allocated(),
            milliseconds=begin.elapsed_time(end),
            flops=counter.get_total_flops(),
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without diffusers' note on types."""
    import logging

    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def errors() -> dict[str, dict[str, float]]:
    """By type and way, the largest error as a part of the largest output."""
    torch.manual_seed(0)
    vae = autoencoder(32).double()
    latents = torch.randn(1, 4, 24, 24, dtype=torch.float64)
    with torch.no_grad():
        exact = plainly(vae, latents)
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float64, torch.float32):
        with _quietly():
            vae = vae.to(dtype)
        row = found.setdefault(str(dtype).removeprefix("torch."), {})
        for way in ways(MIB // 4):
            vae.disable_slicing()
            vae.disable_tiling()
            vae.tile_latent_min_size, vae.tile_sample_min_size = 16, 128
            way.prepare(vae)
            with torch.no_grad():
                made = way.decode(vae, latents.to(dtype))
            row[way.name] = float((made - exact).abs().max() / exact.abs().max())
    return found


def print_rows(rows: list[VaeRow]) -> bool:
    """The tables; whether ours keep within the goals."""
    good = True
    ours = {way.name for way in ways(16 * MIB) if way.ours}
    for key in dict.fromkeys((row.latents, row.dtype) for row in rows):
        group = [row for row in rows if (row.latents, row.dtype) == key]
        plain = group[0]
        print(f"\nlatents {key[0]} x {key[0]}, {key[1]}")
        print(f"{'':<38}{'reserved MiB':>13}{'':>8}{'allocated MiB':>14}{'ms':>8}{'FLOPs':>8}")
        for row in group:
            share, flops = row.reserved_bytes / plain.reserved_bytes, row.flops / plain.flops
            print(
                f"{row.way:<38}{row.reserved_bytes / MIB:>13.0f}{share:>8.0%}{row.allocated_bytes / MIB:>14.1f}"
                f"{row.milliseconds:>8.1f}{flops:>8.3f}"
            )
            if row.way in ours:
                good &= flops <= GOAL_FLOPS
        best = min(row.reserved_bytes / plain.reserved_bytes for row in group if row.way in ours)
        good &= best <= GOAL_RESERVED
    print(f"\nreserved at least 40 % lower, FLOPs at most 5 % more: {'yes' if good else 'NO'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--no-errors", action="store_true", help="leave out what takes minutes on the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        on_card(way, size, dtype)
        for size in (64, 128)
        for dtype in (torch.float32, torch.float16)
        for way in ways(16 * MIB)
    ]
    good = print_rows(rows)
    found = {} if arguments.no_errors else errors()
    for dtype, row in found.items():
        print(f"\nlargest error in {dtype}, as a part of the largest output")
        for way, error in row.items():
            print(f"{way:<38}{error:>13.1e}")
    if arguments.json is not None:
        figures = {"card": CARD, "rows": [asdict(row) for row in rows], "errors": found}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
