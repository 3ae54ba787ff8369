"""What the programs share: a training step in each precision, an inference step, and where a model is built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configurations.optimizers import make_optimizer

DEVICE = "cuda"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"bf16-weights": torch.bfloat16, "fp16-weights": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that is ready to run.

    Attributes:
        step: one iteration; it leaves nothing behind but what the next one needs.
        models: what it trains or asks.
        optimizers: of those models.
    """

    step: Callable[[], object]
    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()


def place(build: Callable[[], nn.Module], precision: str, *, on_card: bool = False) -> nn.Module:
    """Build a model on the host and move it, or on the card; weights in the type that the precision asks for.

    Args:
        build: makes the model.
        precision: see `Precision`.
        on_card: where its weights are drawn: large models on the card, as people do.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if on_card:
        with torch.device(DEVICE):
            model = build()
    else:
        model = build()
    return model.to(device=DEVICE, dtype=WEIGHTS.get(precision, torch.float32))


def lowered(precision: str) -> contextlib.AbstractContextManager[object]:
    """Autocast for the mixed precisions, nothing for the others."""
    if precision in AUTOCAST:
        return torch.autocast(DEVICE, dtype=AUTOCAST[precision])
    return contextlib.nullcontext()


def training(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    precision: str,
    optimizer: str,
    micro_batches: int = 1,
    clip: float | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
) -> Program:
    """The usual loop: forward, backward, step; with a GradScaler in fp16.

    Args:
        model: on the card already.
        loss: forward pass on one micro-batch, returns the loss.
        precision: see `Precision`.
        optimizer: see `make_optimizer`.
        micro_batches: backward passes before a step.
        clip: norm to clip gradients to, None for no clipping.
        optimizer_options: more arguments of the optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    chosen = make_optimizer(optimizer, parameters, **(optimizer_options or {}))
    # With the usual 65536 the first gradients overflow and their steps are skipped: when would depend on the values.
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=precision == "fp16")

    def step() -> None:
        chosen.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            with lowered(precision):
                value = loss() / micro_batches
            scaler.scale(value).backward()
            del value
        if clip is not None:
            scaler.unscale_(chosen)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(chosen)
        scaler.update()

    return Program(step=step, models=(model,), optimizers=(chosen,))


def inference(model: nn.Module, ask: Callable[[], object], *, precision: str) -> Program:
    """A forward pass without gradients; what it returns is dropped."""
    model.eval()

    def step() -> None:
        with torch.inference_mode(), lowered(precision):
            ask()

    return Program(step=step, models=(model,))


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Random tokens [batch, length], drawn on the host and moved."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(DEVICE)


def images(*shape: int) -> Tensor:
    """Random images, drawn on the host and moved."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def parameters_of(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Every parameter once."""
    return list({id(p): p for model in models for p in model.parameters()}.values())
