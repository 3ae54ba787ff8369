"""Whether a batch may be cut into micro-batches, and how their losses weigh: tried on the CPU where that is cheap."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vramfit.errors import UsageError
from vramfit.techniques import Profile
from vramfit.techniques.loss_reduction import EXAMPLES, detect_reduction
from vramfit.techniques.micro_batching import Reduction, batch_size_name
from vramfit.workload import Workload

_CPU_FLOPS = 20e9
"""What a core reaches, at least, for a guess of how long the trial takes."""

_SECONDS = 30.0
"""That a trial may take."""

_PART = 0.25
"""Of the machine's memory that its model may take."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """What is known of a workload's loss.

    Attributes:
        reduction: how it makes one number of a batch, `Reduction.AUTO` where that was not tried; None if no pieces can
            stand for the whole.
        note: what a reader should know; empty where the trial went well.
    """

    reduction: Reduction | None
    note: str = ""


def cutting_of(workload: Workload, profile: Profile) -> Cutting:
    """Try a workload's loss on some examples, whole and in pieces.

    Args:
        workload: plain.
        profile: of a plain step.
    """
    size = sum(parameter.numel() * 4 for parameter in profile.model.parameters())
    # A third of a step's arithmetic is its forward pass.
    examples = profile.sizes[batch_size_name(profile.sizes)]
    flops = profile.step_flops / 3 * EXAMPLES / max(1, examples)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > _PART * memory or 3 * flops > _SECONDS * _CPU_FLOPS:
        return Cutting(
            Reduction.AUTO,
            "micro-batching: that pieces of a batch give the gradients of the whole was not tried, since the model is "
            "too large for it here; a loss that compares examples with each other has no pieces.",
        )
    try:
        return Cutting(detect_reduction(workload))
    except UsageError as error:
        return Cutting(None, f"micro-batching is left out: {error.message}.")
