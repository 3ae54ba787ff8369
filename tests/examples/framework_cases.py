"""Small arguments of every framework script, by the name of the case; groups share an interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

GPT = "--size tiny --seq-len 64 --vocab-size 1000 --steps 2"
VIT = "--hidden-size 128 --layers 2 --image-size 64 --steps 2 --batch-size 4"
GENERATE = "--size tiny --batch-size 2 --prompt-len 48 --new-tokens 4"
LORA = "--size tiny --seq-len 32 --batch-size 2 --steps 2"
QLORA = "--size tiny --batch-size 2 --seq-len 64 --rank 128"
UNET = "--size tiny --image-size 64 --batch-size 2 --steps 1 --samples 1 --sample-steps 1 --precision fp16"
VOLUMES = "--filters 8 --patch 32 --side 40 --steps 1 --batch-size 1"
OPTIMIZERS = "--layers 1 --width 128 --vocab-size 512 --seq-len 128 --steps 2"  # few shapes: each is compiled
RESNET = "--channels 8 --depth 1 --image-size 32 --batch-size 8 --steps 1"
BLOCKS = "--layers 4 --width 128 --seq-len 64 --batch-size 2 --steps 1"
MLP = "--width 1024 --layers 2 --batch-size 64"
SFT = "--size tiny --seq-len 64 --batch-size 2"


@dataclass(frozen=True)
class Case:
    """One run of a script.

    Attributes:
        compiles: ``torch.compile`` does its work; else it leaves functions as they are, which holds the same states and
            takes none of the time. Where a script compiles, one of its cases does; that steps of torchao's optimizers
            compile is in tests/techniques/test_low_bit_optimizer.py.
    """

    script: str
    arguments: str = ""
    gpu: str = "RTX 4090"
    compiles: bool = True


GROUPS: dict[str, dict[str, Case]] = {
    "transformers": {
        "trainer": Case("hf_trainer", GPT),
        "trainer-checkpointing": Case("hf_trainer", f"{GPT} --gradient-checkpointing --empty-cache-steps 1"),
        "trainer-fp16-adafactor": Case("hf_trainer", f"{GPT} --precision fp16 --optim adafactor"),
        "trainer-search": Case(
            "hf_trainer",
            "--size tiny --seq-len 64 --vocab-size 16000 --steps 1 --batch-size 18 --grad-accum 1"
            " --auto-find-batch-size",
            gpu="512MiB",
        ),
        "accelerate": Case("accelerate_train", VIT),
        "accelerate-fp16": Case("accelerate_train", f"{VIT} --precision fp16 --gradient-checkpointing"),
        "accelerate-search": Case(
            "accelerate_train",
            "--hidden-size 128 --layers 2 --image-size 64 --steps 1 --batch-size 120 --find-batch-size",
            gpu="320MiB",
        ),
        "big-model": Case(
            "accelerate_big_model", "--size tiny --gpu-memory 38MiB --prompt-len 16 --new-tokens 2"
        ),
        "big-model-host": Case(
            "accelerate_big_model", "--size tiny --all-on-host --prompt-len 16 --new-tokens 2"
        ),
        "generate": Case("llm_cache_generate", f"{GENERATE} --window 16", compiles=False),
        "generate-beams": Case(
            "llm_cache_generate", f"{GENERATE} --search beams --caches dynamic static quantized"
        ),
        "generate-sample": Case("llm_cache_generate", f"{GENERATE} --search sample --caches dynamic static"),
        "generate-assisted": Case("llm_cache_generate", f"{GENERATE} --search assisted --caches dynamic"),
        "lora": Case("peft_lora", f"{LORA} --merge"),
        "dora": Case("peft_lora", f"{LORA} --method dora"),
        "lora-int8": Case("peft_lora", f"{LORA} --method int8 --gradient-checkpointing"),
        "full": Case("peft_lora", f"{LORA} --method full"),
        **{
            f"qlora-{base}": Case("qlora", f"{QLORA} --base {base} --optimizer {optimizer}")
            for base, optimizer in (
                ("nf4", "paged"),
                ("fp4", "8bit"),
                ("int8", "adamw"),
                ("torchao-nf4", "adamw"),
            )
        },
        **{
            f"quantized-{method}": Case(
                "torchao_quantized", f"--size tiny --method {method} --prompt-len 16 --new-tokens 2"
            )
            for method in ("int8", "int8-dynamic", "int4", "float8-dynamic")
        },
    },
    "torch": {
        **{
            f"optimizer-{name}": Case(
                "torchao_optimizers", f"{OPTIMIZERS} --optimizer {name}", compiles=False
            )
            for name in ("adamw", "adamw8bit", "adamw4bit", "adamwfp8", "adamw-bf16", "offload")
        },
        "activations": Case("activation_memory", BLOCKS),
        "channels-last": Case("channels_last", "--batch-size 4 --image-size 32 --width 8"),
        "contiguous": Case(
            "channels_last", "--batch-size 4 --image-size 32 --width 8 --format contiguous --steps 1"
        ),
        **{
            f"graphs-{way}": Case("cuda_graphs", f"{MLP} --way {way}")
            for way in ("eager", "graph", "callables", "inference", "pool")
        },
        "lightning": Case("lightning_train", f"{RESNET} --epochs 2 --averaging --precision bf16-mixed"),
        "monai": Case("monai_segresnet", VOLUMES),
        "monai-host": Case("monai_segresnet", f"{VOLUMES} --stitch-on-host"),
        "diffusers": Case("diffusers_unet", UNET),
        "diffusers-ema": Case("diffusers_unet", f"{UNET} --ema --vae-slicing --vae-tiling"),
        "diffusers-checkpointing": Case("diffusers_unet", f"{UNET} --gradient-checkpointing --samples 0"),
    },
}

TRL = {
    "sft": Case("trl_sft", SFT),
    "sft-packed": Case("trl_sft", f"{SFT} --packing"),
    "sft-lora": Case("trl_sft", f"{SFT} --lora"),
}
"""Of TRL, which not every environment has."""
if find_spec("trl"):
    GROUPS["transformers"] |= TRL
