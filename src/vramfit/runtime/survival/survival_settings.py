"""What a survivor may do, and which part of an update gradients are of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vramfit.techniques import Numerics
from vramfit.techniques.micro_batching import Reduction


class UpdatePart(Enum):
    """Which batch of an update gradients are of, where ranks reduce what has accumulated.

    Attributes:
        WHOLE: the only one; gradients that are there already are added after the reduction.
        EARLIER: one before the last, whose gradients stay on their rank.
        LAST: all that have accumulated are reduced with it.
    """

    WHOLE = "whole"
    EARLIER = "earlier"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class SurvivalSettings:
    """What a survivor may do.

    Attributes:
        numerics: how far results may differ from the step without a shortage; it goes no further.
        numerics_by_default: whether nobody said so.
        enabled: whether anything is done; if not, steps are those of a plain loop.
        patience: good steps before something is left on trial.
        reduction: how the loss makes one number of a batch, for micro-batches.
        labels: where a batch has what weighs.
        clip_norm: the norm that all gradients together are cut to; None does not cut.
        vote_seconds: that a rank waits for the others.
        host_margin: of a control group's memory limit, the share that is to stay free on the host; 0 looks at none.
        reserve: bytes of the card that are kept back for the optimizer's step.
    """

    numerics: Numerics = Numerics.BITWISE
    numerics_by_default: bool = False
    enabled: bool = True
    patience: int = 50
    reduction: Reduction = Reduction.AUTO
    labels: str = "labels"
    clip_norm: float | None = None
    vote_seconds: float = 300.0
    host_margin: float = 0.05
    reserve: int = 0
