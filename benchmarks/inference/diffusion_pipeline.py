"""Text to image with the shapes of Stable Diffusion XL within 8 GiB: a plan, beside diffusers' own ways.

    python benchmarks/inference/diffusion_pipeline.py [--budget 8GiB] [--gpu 'RTX 4090'] [--steps 2]

Two text encoders, a U-Net and a VAE in float16 with drawn weights, one picture of 1,024 x 1,024, as configured at
huggingface.co/stabilityai/stable-diffusion-xl-base-1.0. Peers are diffusers' pipeline as its users run it: as it is,
with the VAE in tiles, and with models moved to the card when they are used (``enable_model_cpu_offload``); the VAE
stays in float16 everywhere. The plan is for a module with the same parts. All run on the virtual card, the context
included; seconds are simulated.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import vramfit
from vramfit.units import GIB

STEPS = 2
PEERS = {
    "diffusers": (),
    "diffusers, VAE in tiles": ("tiling",),
    "diffusers, models offloaded": ("models",),
    "diffusers, models offloaded, VAE in tiles": ("models", "tiling"),
}
"""What each peer turns on."""


def parts() -> dict[str, nn.Module]:
    """The models in float16."""
    made: dict[str, nn.Module] = {
        "text_encoder": CLIPTextModel(
            CLIPTextConfig(
                hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
            )
        ),
        "text_encoder_2": CLIPTextModelWithProjection(
            CLIPTextConfig(
                hidden_size=1280,
                intermediate_size=5120,
                num_hidden_layers=32,
                num_attention_heads=20,
                hidden_act="gelu",
                projection_dim=1280,
            )
        ),
        "unet": UNet2DConditionModel(
            sample_size=128,
            cross_attention_dim=2048,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        "vae": AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
            sample_size=1024,
            scaling_factor=0.13025,
            force_upcast=False,
        ),
    }
    return {name: part.half().eval() for name, part in made.items()}


class TextToImage(nn.Module):
    """The whole way from tokens to a picture, with guidance, as one module."""

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__()
        self.steps = steps
        for name, part in parts().items():
            self.add_module(name, part)

    def forward(self, tokens: Tensor, latents: Tensor) -> Tensor:
        first = self.text_encoder(tokens, output_hidden_states=True).hidden_states[-2]
        second = self.text_encoder_2(tokens, output_hidden_states=True)
        text = torch.cat([first, second.hidden_states[-2]], -1)
        ids = torch.zeros(tokens.shape[0], 6, dtype=text.dtype, device=text.device)
        added = {"text_embeds": second.text_embeds, "time_ids": ids}
        for step in range(self.steps):
            both = latents.repeat(2, 1, 1, 1)
            noise = self.unet(
                both, 1000 - 20 * step, encoder_hidden_states=text, added_cond_kwargs=added
            ).sample
            plain, guided = noise.chunk(2)
            latents = latents - 0.1 * (plain + 5 * (guided - plain))
        return self.vae.decode(latents / 0.13025).sample


def _batch(batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.ones(2 * batch_size, 77, dtype=torch.long)
    return tokens, torch.randn(batch_size, 4, 128, 128, dtype=torch.half)


sdxl = vramfit.Workload(model=TextToImage, batch=_batch, sizes={"batch_size": 1})
"""The workload that is planned for."""


class _Tokenizer:
    """Gives tokens of any text; the vocabularies are not at hand, and which tokens they are changes no byte."""

    model_max_length = 77
    added_tokens_encoder: dict[str, int] = {}  # noqa: RUF012  # as the real one has it

    def __call__(self, text: Any, **_: Any) -> Any:
        count = len(text) if isinstance(text, list) else 1
        return types.SimpleNamespace(input_ids=torch.ones(count, 77, dtype=torch.long))

    def tokenize(self, text: str) -> list[str]:
        return [text]

    def batch_decode(self, tokens: Tensor) -> list[str]:
        return [""] * len(tokens)


def run_peer(options: tuple[str, ...], steps: int) -> None:
    """One picture by diffusers' pipeline."""
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    pipe = StableDiffusionXLPipeline(
        **parts(),
        tokenizer=_Tokenizer(),
        tokenizer_2=_Tokenizer(),
        scheduler=scheduler,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    if "models" in options:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda")
    if "tiling" in options:
        pipe.vae.enable_tiling()
    pipe("a cat", num_inference_steps=steps, output_type="pt")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", default="8GiB")
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--peer", nargs="*", help="run this on the card that is there, and print nothing")
    options = parser.parse_args(arguments)
    if options.peer is not None:
        run_peer(tuple(options.peer), options.steps)
        return 0
    print("| way | total GiB | reserved GiB | allocated GiB | seconds |\n|---|---|---|---|---|")
    for name, turned_on in PEERS.items():
        told = ("--steps", str(options.steps), "--peer", *turned_on)
        (device,) = (report := vramfit.run(__file__, *told, gpu=options.gpu)).run.devices
        total = device.peak_reserved_bytes + device.context_bytes
        sizes = (total, device.peak_reserved_bytes, device.peak_allocated_bytes)
        print(f"| {name} | {_gib(*sizes)} | {report.run.seconds_simulated:.2f} |", flush=True)
    plan = vramfit.plan(
        f"{Path(__file__)}:sdxl", gpu=options.gpu, budget=options.budget, allow=["layerwise-chunking"]
    )
    for name, one in (("one module", plan.before), ("plan", plan.after)):
        sizes = (one.total_bytes, one.peak_reserved_bytes, one.peak_allocated_bytes)
        print(f"| {name} | {_gib(*sizes)} | {one.step_seconds:.2f} |")
    print("\nThe plan: " + ", ".join(choice.words for choice in plan.choices))
    return 0


def _gib(*sizes: int) -> str:
    return " | ".join(f"{size / GIB:.2f}" for size in sizes)


if __name__ == "__main__":
    sys.exit(main())
