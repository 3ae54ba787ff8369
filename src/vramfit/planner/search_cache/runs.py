"""What a search ran, kept for another one of the same process: the same workload, sizes and card, with less allowed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vramfit.planner.devices.cost import StepCost
from vramfit.planner.micro_batch_trial.batch_trial import MicroBatchVerdict
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Profile


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A combination as it ran.

    Attributes:
        profile: with its model; None where it did not run.
        step: the profile of its step; None where it did not run.
        failed: why it did not run; empty where that needs no word.
    """

    profile: Profile | None
    step: StepProfile | None
    failed: str = ""


@dataclass(slots=True)
class Runs:
    """Runs of searches for the same workload, sizes and card.

    Attributes:
        profiled: combinations without a limit of memory, by what tells them from each other.
        costs: plans within a budget, with the budget and the seconds of the optimizer as well.
        micro_batching: what is known of cutting the workload's batches; None where nobody asked, or the time was over.
        count: runs of all searches so far.
    """

    profiled: dict[Hashable, ProfiledRun] = field(default_factory=dict)
    costs: dict[Hashable, StepCost] = field(default_factory=dict)
    micro_batching: MicroBatchVerdict | None = None
    count: int = 0
