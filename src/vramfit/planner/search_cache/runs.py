"""What a search ran, kept for another one of the same process: the same workload, sizes and card, with less allowed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vramfit.planner.devices.cost import StepCost
from vramfit.planner.micro_batch_trial.batch_trial import MicroBatchVerdict
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Profile


@dataclass(frozen=True, slots=True)
class Watched:
    """A combination as it ran.

    Attributes:
        profile: with its model; None where it did not run.
        observation: the same.
        failed: why it did not run; empty where that needs no word.
    """

    profile: Profile | None
    observation: StepProfile | None
    failed: str = ""


@dataclass(slots=True)
class Runs:
    """Runs of searches for the same workload, sizes and card.

    Attributes:
        watched: combinations without a limit of memory, by what tells them from each other.
        prices: plans within a budget, with the budget and the seconds of the optimizer as well.
        cutting: what is known of cutting the workload's batches; None where nobody asked, or the time was over.
        count: runs of all searches so far.
    """

    watched: dict[Hashable, Watched] = field(default_factory=dict)
    prices: dict[Hashable, StepCost] = field(default_factory=dict)
    cutting: MicroBatchVerdict | None = None
    count: int = 0
