"""What the planner's child can be asked, and how it answers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vramfit.launch.job import Job
from vramfit.planner.memory_budget import DeviceMemory

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is asked of a plan, beside the memory that it may take, and of the search for it.

    Attributes:
        sizes: of the batch, in place of the workload's own.
        numerics: how far results may differ, by name.
        objective: ``throughput``, ``memory``, ``price``, or a size that is made as large as fits.
        allow: names of the techniques to choose from; None for all.
        forbid: names of those to leave out.
        frontier: whether the frontier of memory and time is asked for too.
        time_limit: seconds for one solution of the mixed-integer program.
        search_seconds: for the whole search; None for as long as it takes.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    numerics: str = "rounding"
    objective: str = "throughput"
    allow: Sequence[str] | None = None
    forbid: Sequence[str] = ()
    frontier: bool = False
    time_limit: float = 10.0
    search_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerJob(Job):
    """What all tasks of the child need.

    Attributes:
        task: which it is; the child tells the kind of job by it.
        target: the workload, as ``FILE.py:NAME``.
        memory: where its steps are run, and what they may take.
    """

    folder: str = ""
    task: str
    target: str = ""
    memory: DeviceMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanJob(PlannerJob):
    """The best plan for a budget, and the frontier if it is asked for.

    Attributes:
        options: what is asked of the plan and of the search.
        fresh: whether what earlier searches saw is left aside.
    """

    task: str = "plan"
    options: PlanOptions = field(default_factory=PlanOptions)
    fresh: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FitJob(PlannerJob):
    """The largest value of a size that fits.

    Attributes:
        size: its name; None for the workload's first.
        sizes: where to begin, and the other sizes.
        plan: the file of a plan that is applied first.
    """

    task: str = "fit"
    size: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    plan: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmJob(PlannerJob):
    """The largest value that fits this machine's card, of those up to the one that was predicted.

    Attributes:
        size, sizes, plan: as of a `FitJob`.
        value: what was predicted.
        any_card: whether a card of another kind will do.
    """

    task: str = "confirm"
    size: str
    value: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    plan: str | None = None
    any_card: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRun:
    """A run on this machine's card.

    Attributes:
        name: what it is called while it is made.
        plan: the file of the plan that is applied; None for the plain program.
        sizes: of the batch.
        limit: bytes that it may take; None for the card.
    """

    name: str
    plan: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureJob(PlannerJob):
    """What a workload takes on this machine's card.

    Attributes:
        runs: those that are made.
        any_card: whether a card of another kind will do.
    """

    task: str = "measure"
    runs: tuple[AskedRun, ...]
    any_card: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyMemoryJob(PlannerJob):
    """Whether a plan's memory is what its file says.

    Attributes:
        plan: the file.
    """

    task: str = "verify-memory"
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyValuesJob(PlannerJob):
    """Whether gradients and losses are what a plan promises.

    Attributes:
        plan: its file.
        sizes: of the batches; empty takes the plan's, smaller where that would take too long.
        steps: of the loss curve.
        seconds: for the loss curves, about.
        step_seconds: that one step of the plain program takes, by a guess.
    """

    task: str = "verify-values"
    plan: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: int
    seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Generic[Found]):
    """What the child found.

    Attributes:
        found: the value of its task.
        card_here: whether this machine has a card.
    """

    found: Found
    card_here: bool
