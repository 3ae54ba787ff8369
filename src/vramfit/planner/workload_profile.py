"""What the techniques look at, from a step that was watched on some device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Profile
from vramfit.workload import State, Workload


def profile_of(
    workload: Workload, state: State, sizes: Mapping[str, int], step: StepProfile, **figures: Any
) -> Profile:
    """The profile of a workload.

    Args:
        workload: that ran.
        state: its model and optimizer.
        sizes: of the batch.
        step: its profile.
        figures: the device's own: the other fields of `Profile`.
    """
    return Profile(
        model=state.model,
        optimizer=state.optimizer,
        sizes=dict(sizes),
        trains=workload.trains,
        own_step=workload.step is not None,
        step_seconds=step.seconds,
        step_flops=step.flops,
        logits_bytes=step.logits_bytes,
        blocks=step.blocks,
        **figures,
    )
