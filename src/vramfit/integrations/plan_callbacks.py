"""What the callbacks of all trainers share: the pieces of a batch, and what a plan cannot go with in a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.planner.plans import Plan
from vramfit.techniques import AttachedProgram, Choice, Piece
from vramfit.workload import Batch, check_loss

_CASTING = ("mixed-precision", "low-precision-training")
_UNSCALED = ("step-in-backward", "optimizer-offload")
_NOTHING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a trainer does besides a plan, each as its user wrote it; empty where it does not.

    Attributes:
        precision: lowers the precision.
        scaling: scales losses.
        accumulation: adds up the gradients of several batches.
        clipping: cuts gradients.
        no_clipping: what to write instead of `clipping` to have none.
    """

    precision: str = ""
    scaling: str = ""
    accumulation: str = ""
    clipping: str = ""
    no_clipping: str = ""


def plan_from(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or what a file of one holds.

    Raises:
        UsageError: there is no such file, or it is not a plan.
    """
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def check(choices: Iterable[Choice], settings: Settings) -> None:
    """Make sure that what a plan does and what a trainer does go together.

    Raises:
        UsageError: both lower the precision, or a technique takes gradients away that the trainer still needs.
    """
    for choice in choices:
        if choice.name in _CASTING and settings.precision:
            raise UsageError(
                f"{settings.precision} and {choice.name} of the plan both lower the precision",
                f"Leave {settings.precision} out: the plan does it",
            )
        if choice.name in _UNSCALED and settings.scaling:
            raise UsageError(
                f"{settings.scaling} scales losses, and {choice.name} of the plan uses gradients before they are "
                "divided again",
                f"Train in bfloat16, or forbid {choice.name} in the plan",
            )
        if settings.accumulation and _drops_gradients(choice):
            raise UsageError(
                f"{settings.accumulation} adds up gradients, and {choice.name} of the plan does not keep them",
                f"Leave {settings.accumulation} out, or forbid {choice.name} in the plan",
            )
        if settings.clipping and choice.name == "step-in-backward":
            raise UsageError(
                f"{settings.clipping} clips all gradients together, and step-in-backward of the plan never has them "
                "together",
                f"{settings.no_clipping}, or forbid step-in-backward in the plan",
            )


def _drops_gradients(choice: Choice) -> bool:
    return choice.name == "step-in-backward" or bool(getattr(choice.setting, "offload_gradients", False))


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Give one object an attribute over its class's; calling what comes back leaves the object as it was."""
    before = vars(owner).get(name, _NOTHING)
    setattr(owner, name, value)

    def back() -> None:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return back


def pieces_of(live: AttachedProgram, batch: Batch) -> list[Piece]:
    """The pieces of a batch, each with the weight of its loss; one with all of it where the plan leaves it whole.

    Raises:
        UsageError: the batch cannot be cut, or is empty.
    """
    if live.splitter is None:
        return [Piece(batch=batch, weight=1.0, last=True)]
    pieces = list(live.splitter(batch))
    if not pieces:
        raise UsageError("the batch is empty", "Let the data loader make at least one example")
    return pieces


def weighted(loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """A piece's loss as its share of the whole batch's.

    Raises:
        UsageError: the loss is not a scalar.
    """
    check_loss(loss)
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight


def end_gradients(live: AttachedProgram) -> None:
    """Bring the gradients of a step to where they are clipped and used: to the parameters, and without a scale."""
    for action in live.gathering:
        action()
    if live.scaler is not None and live.optimizer is not None:
        live.scaler.unscale_(live.optimizer)
