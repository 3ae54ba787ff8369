"""The list of configurations, the most telling first. Imports no torch: it is read by programs that only list it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configurations.training import Program

GIB = 1 << 30


class Precision(Enum):
    """Number formats of a program, by the name that its options use."""

    FP32 = "fp32"
    """float32, TF32 off."""
    TF32 = "tf32"
    """float32 with TF32 in matrix products and convolutions."""
    BF16 = "bf16"
    """float32 weights under bfloat16 autocast."""
    FP16 = "fp16"
    """float32 weights under float16 autocast, with a GradScaler in training."""
    BF16_WEIGHTS = "bf16-weights"
    """Everything in bfloat16."""
    FP16_WEIGHTS = "fp16-weights"
    """Everything in float16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One program with its options.

    Attributes:
        name: what its recording is called.
        build: ``module:function`` of this package that makes the `Program`.
        precision: its number formats.
        optimizer: what trains it (see `make_optimizer`), None for inference.
        options: more arguments of that function.
        steps: how often its step runs.
        packages: what it needs beside torch.
        alloc_conf: allocator settings, as in ``PYTORCH_ALLOC_CONF``.
        memory_bytes: the most that the process may take of the card; None for all of it.
    """

    name: str
    build: str
    precision: Precision
    optimizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    packages: tuple[str, ...] = ()
    alloc_conf: str = ""
    memory_bytes: int | None = None

    def load(self) -> Program:
        """Build the program on the current device; imports torch and what the program needs."""
        module, _, function = self.build.partition(":")
        arguments = {"precision": self.precision.value, **self.options}
        if self.optimizer is not None:
            arguments["optimizer"] = self.optimizer
        return getattr(importlib.import_module(f"configurations.{module}"), function)(**arguments)


FP32, TF32, BF16, FP16 = Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16
BF16_WEIGHTS, FP16_WEIGHTS = Precision.BF16_WEIGHTS, Precision.FP16_WEIGHTS
FOREACH, FUSED, LOOP = "adamw-foreach", "adamw-fused", "adamw-loop"
EXPANDABLE = "expandable_segments:True"
HF = ("transformers",)


def row(
    name: str,
    build: str,
    precision: Precision,
    optimizer: str | None = None,
    *,
    alloc_conf: str = "",
    packages: tuple[str, ...] = (),
    memory_bytes: int | None = None,
    steps: int = 3,
    **options: Any,
) -> Configuration:
    """One row of the list below."""
    return Configuration(
        name=name,
        build=build,
        precision=precision,
        optimizer=optimizer,
        options=options,
        steps=steps,
        packages=packages,
        alloc_conf=alloc_conf,
        memory_bytes=memory_bytes,
    )


GPT, LLAMA, BERT, CLASSIFIER, HF_TRAIN = (
    "language:gpt",
    "language:llama",
    "language:bert",
    "vision:classifier",
    "huggingface:train",
)
COMPILED, FSDP2 = "compiled:language_model", "sharded:fsdp2"
OF_LLAMA = {"kind": "llama", "size": "llama-1b", "batch": 2, "length": 2048}
LISTED = (
    # One of each kind first.
    row("gpt2-small-fp32", GPT, FP32, FOREACH, batch=4, length=512),
    row("gpt2-small-bf16-fused", GPT, BF16, FUSED, batch=8, length=1024),
    row("resnet50-fp32", CLASSIFIER, FP32, "sgd-momentum", model="resnet50", batch=32),
    row("llama-1b-bf16", LLAMA, BF16_WEIGHTS, FOREACH, batch=2, length=2048),
    row("bert-base-fp16", BERT, FP16, FOREACH, batch=16, length=256),
    row("unet3d-fp32", "vision:volume", FP32, "adam", depth=96),
    row("diffusion-unet-bf16", "vision:diffusion", BF16, FOREACH, batch=16, side=64),
    row("lstm-fp32-sgd", "recurrent:recurrent", FP32, "sgd", kind="lstm"),
    row("dcgan-fp32", "vision:gan", FP32, "adam", batch=128),
    row("moe-capacity-bf16", "language:moe", BF16, FOREACH, routing="capacity"),
    row("vit-base-bf16", CLASSIFIER, BF16, FOREACH, model="vit-base", batch=64),
    row("t5-small-adafactor", "language:t5", FP32, "adafactor", batch=8, length=256),
    row("llama-1b-inference", "language:llama_inference", BF16_WEIGHTS, batch=4, length=2048),
    row("llama-1b-generate", "language:generate", BF16_WEIGHTS, batch=8, prompt=512, new=32, steps=1),
    # Precisions and optimizers.
    row("gpt2-medium-tf32-loop", GPT, TF32, LOOP, size="gpt2-medium", batch=4, length=512),
    row("gpt2-small-fp16", GPT, FP16, FOREACH, batch=8, length=512),
    row("gpt2-small-adam-8bit", GPT, BF16, "adamw-8bit", batch=4, length=512),
    row("gpt2-small-sgd", GPT, FP32, "sgd-momentum", batch=4, length=512),
    row("gpt2-small-adam", GPT, TF32, "adam", batch=4, length=1024),
    row("bert-base-sgd-tf32", BERT, TF32, "sgd", batch=16, length=256),
    row("gpt2-small-rmsprop", GPT, BF16, "rmsprop", batch=4, length=512),
    row("t5-base-bf16", "language:t5", BF16, FUSED, size="t5-base", batch=4, length=512),
    # Checkpointing, accumulation, clipping, offload, adapters.
    row("gpt2-small-checkpoint", GPT, BF16, FOREACH, batch=8, length=1024, recompute="non-reentrant"),
    row("gpt2-small-checkpoint-reentrant", GPT, BF16, FOREACH, batch=8, length=1024, recompute="reentrant"),
    row(
        "llama-1b-checkpoint-8k",
        LLAMA,
        BF16_WEIGHTS,
        FUSED,
        batch=1,
        length=8192,
        recompute="non-reentrant",
    ),
    row("gpt2-small-accumulate-clip", GPT, BF16, FOREACH, batch=4, length=512, micro_batches=4, clip=1.0),
    row("gpt2-small-offload", GPT, BF16, FOREACH, batch=4, length=512, offload=True, steps=2),
    row("llama-3b-lora", LLAMA, BF16_WEIGHTS, FOREACH, size="llama-3b", batch=1, length=2048, adapters=16),
    # Attention backends.
    row("gpt2-small-flash", GPT, BF16, FOREACH, batch=8, length=1024, attention="flash"),
    row("gpt2-small-efficient", GPT, BF16, FOREACH, batch=8, length=1024, attention="efficient"),
    row("gpt2-small-math", GPT, BF16, FOREACH, batch=4, length=1024, attention="math"),
    row("gpt2-small-cudnn", GPT, BF16, FOREACH, batch=8, length=1024, attention="cudnn"),
    # Convolutions.
    row(
        "resnet50-bf16-channels-last",
        CLASSIFIER,
        BF16,
        "sgd-momentum",
        model="resnet50",
        batch=64,
        channels_last=True,
    ),
    row("resnet50-tf32-benchmark", CLASSIFIER, TF32, "sgd-momentum", model="resnet50", batch=32, search=True),
    row("resnet18-fp16-inference", CLASSIFIER, FP16_WEIGHTS, model="resnet18", batch=64, channels_last=True),
    row("resnet18-fp32", CLASSIFIER, FP32, "sgd", model="resnet18", batch=16),
    row("resnet152-fp16", CLASSIFIER, FP16, "sgd-momentum", model="resnet152", batch=32),
    row("convnext-tiny-bf16", CLASSIFIER, BF16, FOREACH, model="convnext-tiny", batch=32),
    row("unet3d-bf16", "vision:volume", BF16, FUSED, depth=128),
    row("diffusion-unet-fp32", "vision:diffusion", FP32, "adam", batch=4, side=64),
    # Expandable segments and other settings of the allocator.
    row("gpt2-small-expandable", GPT, BF16, FOREACH, batch=8, length=1024, alloc_conf=EXPANDABLE),
    row("llama-1b-expandable", LLAMA, BF16_WEIGHTS, FUSED, batch=4, length=2048, alloc_conf=EXPANDABLE),
    row(
        "resnet50-expandable",
        CLASSIFIER,
        BF16,
        "sgd-momentum",
        model="resnet50",
        batch=64,
        alloc_conf=EXPANDABLE,
    ),
    row(
        "generate-expandable",
        "language:generate",
        BF16_WEIGHTS,
        batch=16,
        new=32,
        steps=1,
        alloc_conf=EXPANDABLE,
    ),
    row(
        "gpt2-small-rounding",
        GPT,
        BF16,
        FOREACH,
        batch=8,
        length=1024,
        alloc_conf="roundup_power2_divisions:8,max_split_size_mb:256",
    ),
    # Under pressure: the allocator gives cached segments back and retries; the second runs out of memory.
    row(
        "llama-1b-pressed",
        LLAMA,
        BF16_WEIGHTS,
        FUSED,
        batch=1,
        length=8192,
        recompute="non-reentrant",
        memory_bytes=23 * GIB,
    ),
    row("llama-1b-too-large", LLAMA, BF16_WEIGHTS, FOREACH, batch=8, length=2048, memory_bytes=24 * GIB),
    # Sizes.
    row("gpt2-small-batch-1", GPT, BF16, FOREACH, batch=1, length=256),
    row("gpt2-small-batch-32", GPT, BF16, FUSED, batch=32, length=1024),
    row("gpt2-small-inference", "language:gpt_inference", FP16_WEIGHTS, batch=8, length=1024),
    row("llama-3b-bf16", LLAMA, BF16_WEIGHTS, FUSED, size="llama-3b", batch=2, length=2048),
    row("bert-large-bf16", BERT, BF16, FUSED, size="bert-large", batch=16, length=512),
    row("vit-large-inference", CLASSIFIER, FP16_WEIGHTS, model="vit-large", batch=64),
    row("lstm-bidirectional-bf16", "recurrent:recurrent", BF16, "adam", kind="lstm", both_ways=True),
    row("gru-fp32", "recurrent:recurrent", FP32, "adam", kind="gru", layers=3),
    row(
        "generate-fixed-cache", "language:generate", BF16_WEIGHTS, batch=8, new=32, steps=1, fixed_cache=True
    ),
    # The transformers library, and routing by data.
    row("hf-gpt2-bf16", HF_TRAIN, BF16, FOREACH, kind="gpt2", batch=4, length=1024, packages=HF),
    row("hf-bert-fp16", HF_TRAIN, FP16, FOREACH, kind="bert", batch=16, length=256, packages=HF),
    row("hf-t5-fp32", HF_TRAIN, FP32, "adafactor", kind="t5", batch=8, length=256, packages=HF),
    row("hf-vit-bf16", HF_TRAIN, BF16, FUSED, kind="vit", batch=32, packages=HF),
    row(
        "hf-llama-checkpoint",
        HF_TRAIN,
        BF16_WEIGHTS,
        FUSED,
        kind="llama",
        batch=2,
        length=2048,
        recompute=True,
        on_card=True,
        packages=HF,
    ),
    row("hf-llama-generate", "huggingface:generate", BF16_WEIGHTS, kind="llama", steps=1, packages=HF),
    row("moe-routed-bf16", "language:moe", BF16, FOREACH, routing="routed", batch=2, length=1024),
    # Compiled: whole models, blocks, functions, changing lengths, broken graphs; one step more, for the first compiles.
    row("compiled-gpt2-bf16", COMPILED, BF16, FOREACH, steps=4),
    row("compiled-gpt2-fp32", COMPILED, FP32, FUSED, batch=4, steps=4),
    row("compiled-gpt2-module", COMPILED, BF16, FUSED, scope="module", batch=4, steps=4),
    row("compiled-gpt2-blocks", COMPILED, BF16, FOREACH, scope="blocks", steps=4),
    row("compiled-gpt2-loss", COMPILED, BF16, FOREACH, scope="loss", steps=4),
    row("compiled-gpt2-step", COMPILED, BF16, "adam", scope="step", steps=4),
    row("compiled-gpt2-broken", COMPILED, BF16, FOREACH, scope="broken", steps=4),
    row("compiled-gpt2-lengths", COMPILED, BF16, FUSED, lengths=(512, 1024, 768, 896, 640), steps=6),
    row("compiled-gpt2-dynamic", COMPILED, BF16, FUSED, lengths=(512, 1024, 768), dynamic=True, steps=4),
    row("compiled-gpt2-overhead", COMPILED, BF16, FUSED, mode="reduce-overhead", steps=5),
    row("compiled-gpt2-checkpoint", COMPILED, BF16, FUSED, recompute="non-reentrant", batch=16, steps=4),
    row("compiled-gpt2-inference", COMPILED, FP16_WEIGHTS, steps=4),
    row("compiled-llama-blocks", COMPILED, BF16_WEIGHTS, FUSED, **OF_LLAMA, scope="blocks", steps=4),
    row(
        "compiled-llama-checkpoint",
        COMPILED,
        BF16_WEIGHTS,
        FUSED,
        **OF_LLAMA,
        recompute="non-reentrant",
        scope="blocks",
        steps=4,
    ),
    row("compiled-llama-whole", COMPILED, BF16, FUSED, **OF_LLAMA, steps=4),
    row(
        "compiled-llama-float8",
        COMPILED,
        BF16,
        FUSED,
        **OF_LLAMA,
        scope="blocks",
        float8=True,
        steps=4,
        packages=("torchao",),
    ),
    row("compiled-resnet50", "compiled:classifier", BF16, "sgd-momentum", channels_last=True, steps=4),
    row("compiled-vit", "compiled:classifier", BF16, FOREACH, model="vit-base", batch=64, steps=4),
    row(
        "compiled-timm-convnext",
        "compiled:classifier",
        BF16,
        FOREACH,
        model="timm/convnext_tiny",
        steps=4,
        packages=("timm",),
    ),
    row(
        "compiled-timm-efficientnet",
        "compiled:classifier",
        FP16,
        "rmsprop",
        model="timm/efficientnet_b0",
        steps=4,
        packages=("timm",),
    ),
    row("compiled-diffusion-unet", "compiled:diffusion", BF16, FOREACH, steps=4),
    row("compiled-denoise", "compiled:denoise", FP16_WEIGHTS, steps=2, packages=("diffusers",)),
    # Programs of several ranks in a world of one, and the many iterations of real trainings.
    row("fsdp2-llama-1b", FSDP2, FP32, FUSED, steps=1),
    row("fsdp2-llama-1b-waiting", FSDP2, FP32, FUSED, log_every=1, steps=1),
    row("fsdp2-llama-1b-checkpoint", FSDP2, FP32, FUSED, length=4096, recompute=True, steps=1),
    row("fsdp2-llama-1b-expandable", FSDP2, FP32, FUSED, steps=1, alloc_conf=EXPANDABLE),
    row("fsdp2-llama-1b-unsharded", FSDP2, FP32, FUSED, reshard=False, steps=1),
    row("fsdp2-llama-160m-long", FSDP2, FP32, FUSED, size="llama-160m", iterations=500, steps=1),
    row(
        "fsdp2-llama-160m-long-expandable",
        FSDP2,
        FP32,
        FUSED,
        size="llama-160m",
        iterations=500,
        steps=1,
        alloc_conf=EXPANDABLE,
    ),
    row("fsdp2-llama-1b-compiled", FSDP2, FP32, FUSED, compiled=True, steps=1),
    row(
        "fsdp2-llama-1b-compiled-checkpoint",
        FSDP2,
        FP32,
        FUSED,
        length=4096,
        compiled=True,
        recompute=True,
        steps=1,
    ),
    row(
        "fsdp2-llama-1b-float8",
        FSDP2,
        FP32,
        FUSED,
        compiled=True,
        float8=True,
        steps=1,
        packages=("torchao",),
    ),
    row("ddp-gpt2", "sharded:ddp", BF16, FOREACH, steps=1),
    row("ddp-gpt2-compiled", "sharded:ddp", BF16, FUSED, compiled=True, as_views=True, steps=1),
)
TINY = (
    row("tiny-gpt", GPT, FP32, FOREACH, size="gpt2-tiny", batch=2, length=64),
    row(
        "tiny-llama-expandable",
        LLAMA,
        BF16_WEIGHTS,
        FUSED,
        size="llama-tiny",
        batch=2,
        length=64,
        alloc_conf=EXPANDABLE,
    ),
    row("tiny-resnet", CLASSIFIER, FP16, "sgd-momentum", model="resnet8", batch=2, side=64),
    row("tiny-compiled", COMPILED, FP32, FOREACH, size="gpt2-tiny", batch=2, length=64),
    row("tiny-fsdp2", FSDP2, FP32, FUSED, size="llama-tiny", batch=2, length=64, iterations=3, steps=1),
)
"""For tests of the machinery; too small to tell anything of memory, and not among those recorded."""

CONFIGURATIONS: Mapping[str, Configuration] = MappingProxyType({c.name: c for c in LISTED})
"""Those to record, by name, the most telling first."""

ALL: Mapping[str, Configuration] = MappingProxyType({c.name: c for c in (*LISTED, *TINY)})
"""Every configuration that has a name."""
