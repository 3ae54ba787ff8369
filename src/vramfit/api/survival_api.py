"""Recovery from running out of memory, from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import nn

from vramfit.arguments import (
    call_argument,
    number_argument,
    shown,
    size_argument,
    text_argument,
    whole_argument,
)
from vramfit.errors import UsageError
from vramfit.runtime.survival.forward_survivor import ForwardSurvivor
from vramfit.runtime.survival.ladder import SurvivalEvent
from vramfit.runtime.survival.survival_settings import SurvivalSettings
from vramfit.runtime.survival.survivor import Survivor
from vramfit.techniques import Numerics
from vramfit.techniques.micro_batching import Reduction


@overload
def survive(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = ...,
    scheduler: Any = ...,
    scaler: torch.amp.GradScaler | None = ...,
    clip_norm: float | None = ...,
    numerics: str = ...,
    reduction: str = ...,
    labels: str = ...,
    patience: int = ...,
    vote_seconds: float = ...,
    host_margin: float = ...,
    reserve: int | str = ...,
    on_event: Callable[[SurvivalEvent], None] | None = ...,
) -> Survivor: ...


@overload
def survive(
    model: nn.Module, optimizer: None = ..., *, on_event: Callable[[SurvivalEvent], None] | None = ...
) -> ForwardSurvivor: ...


def survive(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    numerics: str = "rounding",
    reduction: str = "auto",
    labels: str = "labels",
    patience: int = 50,
    vote_seconds: float = 300.0,
    host_margin: float = 0.05,
    reserve: int | str = 0,
    on_event: Callable[[SurvivalEvent], None] | None = None,
) -> Survivor | ForwardSurvivor:
    """Steps, or calls without an optimizer, that outlive running out of memory, each done exactly once.

    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> with vramfit.survive(model, optimizer, loss=loss) as survivor:
    ...     losses = [survivor.step(batch) for batch in torch.rand(3, 4, 8)]
    >>> survivor.steps, survivor.events
    (3, [])

    A training step is a transaction: after a shortage of memory its gradients, buffers and random states are put back,
    what the attempt held is let go, and it begins anew: the same again, then with what is free in one piece, in
    micro-batches, with checkpointing, with activations on the host. The optimizer's step commits slice by slice, and
    ends on the host where the card has no room for its states. What was done is in ``survivor.events`` and logged by
    the logger ``vramfit.survive``; it is left again when there is room. Every form of shortage is recognised, on the
    device and on the host; all other errors pass, with everything as before the step.

    As a decorator, ``@vramfit.survive(model, optimizer)`` makes a step of a function that computes the loss of a batch.
    Without an optimizer, ``survive(model).run(*inputs)`` is a call without gradients, in parts where it runs out.

    Args:
        model: as the loop has it; wrapped by DistributedDataParallel its ranks vote before each reduction.
        optimizer: one that steps parameter by parameter, as torch's do but LBFGS; others step as one slice.
        loss: of the model and a batch, a scalar tensor.
        scheduler: steps after each of the optimizer's steps.
        scaler: a `torch.amp.GradScaler`.
        clip_norm: the norm that all gradients together are cut to.
        numerics: ``"bitwise"`` allows no micro-batches, ``"rounding"`` none for models with batch norm,
            ``"approximate"`` both.
        reduction: how the loss makes one number of a batch: ``"mean"``, ``"sum"``, ``"tokens"``, ``"next-tokens"``,
            ``"weights"``; ``"auto"`` looks at the batch.
        labels: where the batch has what weighs, for those.
        patience: good steps before something that was done is left on trial.
        vote_seconds: that a rank waits for the others.
        host_margin: before each step, less than this share of a control group's memory limit left on the host counts
            as a shortage there, before the kernel ends the process; 0 does not look.
        reserve: bytes, or a size such as ``"512MiB"``, of the card that are kept back, and given to the optimizer's
            step alone where it finds no other room: it then stays on the card, bit for bit.
        on_event: called with each event.

    Raises:
        UsageError: arguments are no such, the model is sharded, or the optimizer cannot be guarded.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={shown(model)} is no module", "Give the model that the loop trains")
    if on_event is not None:
        call_argument("on_event", on_event)
    if optimizer is None:
        if loss is not None or scheduler is not None or scaler is not None:
            raise UsageError(
                "a loss, a schedule or a scaler belong to an optimizer", "Give the optimizer too"
            )
        return ForwardSurvivor(model, on_event=on_event)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer={shown(optimizer)} is no optimizer of torch", "Give the one that the loop steps"
        )
    settings = SurvivalSettings(
        numerics=Numerics.parse(text_argument("numerics", numerics)),
        patience=whole_argument("patience", patience, least=1),
        reduction=_reduction(reduction),
        labels=text_argument("labels", labels),
        clip_norm=None
        if clip_norm is None
        else number_argument("clip_norm", clip_norm, least=0.0, most=1e30),
        vote_seconds=number_argument("vote_seconds", vote_seconds, least=0.1, most=1e6),
        host_margin=number_argument("host_margin", host_margin, least=0.0, most=0.9),
        reserve=size_argument("reserve", reserve, least=0),
    )
    given = None if loss is None else call_argument("loss", loss)
    return Survivor(model, optimizer, given, settings, scheduler=scheduler, scaler=scaler, on_event=on_event)


def _reduction(given: Any) -> Reduction:
    try:
        return Reduction(text_argument("reduction", given))
    except ValueError:
        names = ", ".join(one.value for one in Reduction)
        raise UsageError(f"reduction={shown(given)} is none that is known", f"Give one of {names}") from None
