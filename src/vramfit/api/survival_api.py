"""Recovery from running out of memory, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn

from vramfit.arguments import (
    call_argument,
    flag_argument,
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
    loss: Callable[..., Any] | None = ...,
    scheduler: Any = ...,
    scaler: torch.amp.GradScaler | None = ...,
    clip_norm: float | None = ...,
    state: Sequence[Any] = ...,
    numerics: str | None = ...,
    reduction: str = ...,
    labels: str = ...,
    patience: int = ...,
    vote_seconds: float = ...,
    host_margin: float = ...,
    reserve: int | str = ...,
    enabled: bool | None = ...,
    on_event: Callable[[SurvivalEvent], None] | None = ...,
) -> Survivor: ...


@overload
def survive(
    model: nn.Module,
    optimizer: None = ...,
    *,
    enabled: bool | None = ...,
    on_event: Callable[[SurvivalEvent], None] | None = ...,
) -> ForwardSurvivor: ...


def survive(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    state: Sequence[Any] = (),
    numerics: str | None = None,
    reduction: str = "auto",
    labels: str = "labels",
    patience: int = 50,
    vote_seconds: float = 300.0,
    host_margin: float = 0.05,
    reserve: int | str = 0,
    enabled: bool | None = None,
    on_event: Callable[[SurvivalEvent], None] | None = None,
) -> Survivor | ForwardSurvivor:
    """Steps, or calls without an optimizer, that outlive running out of memory, each done exactly once.

    **Your step may be called again.** After a shortage of memory all that it moved is put back, and it is called anew.

    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> with vramfit.survive(model, optimizer, loss=loss) as survivor:
    ...     losses = [survivor.step(batch) for batch in torch.rand(3, 4, 8)]
    >>> survivor.steps, survivor.events
    (3, [])

    A training step is a transaction: after a shortage its gradients, buffers, attributes, random states and all else
    that its function reaches are put back, what the attempt held is let go, and it begins anew: the same again, then
    with what is free in one piece, with checkpointing, with activations on the host. All of these give the same results
    bit for bit. Pieces of the batch are taken only where ``numerics`` allows them, and only once their gradients were
    compared with the batch's on this loss. The optimizer's step is done as a whole. What was done is in
    ``survivor.events`` and logged by the logger ``vramfit.survive``; it is left again when there is room. Every form of
    shortage is recognised, on the device and on the host; all other errors pass, with everything as before the step.

    A step is ``zero_grad``, forward, backward, the norm, the optimizer's step and the schedule; ``survivor.accumulate``
    adds a batch's gradients to those of the next step. As a decorator, ``@vramfit.survive(model, optimizer)`` makes a
    step of a function that computes the loss. Without an optimizer, ``survive(model).run(*inputs)`` is a call without
    gradients, in parts where it runs out.

    Args:
        model: as the loop has it; wrapped by DistributedDataParallel its ranks vote before each reduction.
        optimizer: any but LBFGS and others that want a closure; of one that is not torch's, all that it holds is
            copied to the host before each of its steps.
        loss: of the model and what ``step`` is called with: a scalar tensor; or that with metrics beside it, as a tuple
            that begins with it, or a mapping with the entry ``loss``.
        scheduler: steps after each of the optimizer's steps; not one that wants a metric.
        scaler: a `torch.amp.GradScaler`.
        clip_norm: the norm that all gradients together are cut to.
        state: what else a step moves, where that cannot be seen or set back: modules, optimizers, tensors, generators,
            containers, and whatever has ``state_dict`` and ``load_state_dict``.
        numerics: ``"bitwise"``, the default, changes no result; ``"rounding"`` allows pieces of the batch whose
            gradients were compared with the batch's, but for models with batch norm; ``"approximate"`` for those too.
        reduction: how the loss makes one number of a batch: ``"mean"``, ``"sum"``, ``"tokens"``, ``"next-tokens"``,
            ``"weights"``; ``"auto"`` looks at the batch.
        labels: where the batch has what weighs, for those.
        patience: good steps before something that was done is left on trial.
        vote_seconds: that a rank waits for the others.
        host_margin: before each step, less than this share of a control group's memory limit left on the host counts
            as a shortage there, before the kernel ends the process; 0 does not look.
        reserve: bytes, or a size such as ``"512MiB"``, of the card that are kept back, and given to the optimizer's
            step alone where it finds no other room: it then stays on the card, bit for bit.
        enabled: False does nothing: steps are those of a plain loop. None asks the environment variable
            ``VRAMFIT_SURVIVE``, where 0 switches it off.
        on_event: called with each event.

    Raises:
        UsageError: arguments are wrong, the model is sharded or has collectives of its own, the schedule wants a
            metric, or the optimizer cannot be guarded.
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
        return ForwardSurvivor(model, on_event=on_event, enabled=_is_enabled(enabled))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer={shown(optimizer)} is no optimizer of torch", "Give the one that the loop steps"
        )
    settings = SurvivalSettings(
        numerics=Numerics.BITWISE
        if numerics is None
        else Numerics.parse(text_argument("numerics", numerics)),
        numerics_by_default=numerics is None,
        enabled=_is_enabled(enabled),
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
    return Survivor(
        model, optimizer, given, settings, scheduler=scheduler, scaler=scaler, state=state, on_event=on_event
    )


def _is_enabled(given: bool | None) -> bool:
    """Whether anything is to be done, as an argument or the environment says."""
    if given is not None:
        return flag_argument("enabled", given)
    text = os.environ.get("VRAMFIT_SURVIVE", "1").strip()
    if text not in ("", "0", "1"):
        raise UsageError(
            f"VRAMFIT_SURVIVE={text} is neither 0 nor 1", "Set it to 0 to switch vramfit.survive off"
        )
    return text != "0"


def _reduction(given: Any) -> Reduction:
    try:
        return Reduction(text_argument("reduction", given))
    except ValueError:
        names = ", ".join(one.value for one in Reduction)
        raise UsageError(f"reduction={shown(given)} is none that is known", f"Give one of {names}") from None
