"""What the planner is asked: what a plan may take, and the jobs of its child with their answers. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.launch.job import Job

Found = TypeVar("Found")

PRICE = "price"
"""The objective that chooses the card, and with it the budget."""

MARGIN = 0.02
"""Part of a card that is left free where no budget is given: drivers, displays and neighbours differ by that much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Where steps of a workload are run, and what they may take there, in bytes.

    Attributes:
        device: ``cuda`` for a virtual card, ``card`` for this machine's own, ``cpu``.
        gpu: the card that is meant; None for the CPU.
        margin: of the budget, left free.
        host_bytes: of the host that may be spent.
        host_budget: the same where it was given; None for what this machine has.
        alloc_conf: allocator settings; None reads the environment.
    """

    device: str
    gpu: GpuSpec | None
    budget: int
    margin: int = 0
    host_bytes: int = 0
    host_budget: int | None = None
    alloc_conf: str | None = None

    @property
    def limit(self) -> int:
        """Bytes of the budget beside the margin."""
        return self.budget - self.margin


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """What a workload may take.

    Attributes:
        gpu: the virtual card; None for this machine's CPU.
        budget: bytes of it; None for the card.
        margin: bytes of the budget that are left free; None for 2 % of the card, and nothing of a given budget.
        host_bytes: of the host that may be spent; None for what this machine has.
        alloc_conf: allocator settings; None reads the environment.
    """

    gpu: GpuSpec | None
    budget: int | None = None
    margin: int | None = None
    host_bytes: int | None = None
    alloc_conf: str | None = None

    def settled(self) -> DeviceMemory:
        """The same with every figure filled in.

        Raises:
            UsageError: the CPU has no budget, or nothing is left of it.
        """
        if self.gpu is None and self.budget is None:
            raise UsageError("the CPU needs a budget", "Give one, such as --budget 2GiB")
        budget = self.gpu.total_bytes if self.budget is None and self.gpu is not None else self.budget
        assert budget is not None
        margin = self.margin
        if margin is None:
            margin = round(MARGIN * budget) if self.budget is None else 0
        if margin >= budget:
            raise UsageError("nothing is left of the budget beside the margin", "Give a smaller margin")
        return DeviceMemory(
            device="cpu" if self.gpu is None else "cuda",
            gpu=self.gpu,
            budget=budget,
            margin=margin,
            host_bytes=free_host_bytes() if self.host_bytes is None else self.host_bytes,
            host_budget=self.host_bytes,
            alloc_conf=self.alloc_conf,
        )


def budget_for_any_card(budget: MemoryBudget) -> MemoryBudget:
    """The budget of a search for the cheapest card: each card's own memory.

    Raises:
        UsageError: a card or a budget was given.
    """
    if budget.gpu is not None or budget.budget is not None or budget.margin is not None:
        raise UsageError(
            "the objective price chooses the card, and its whole memory is the budget",
            "Leave card, budget and margin out, or take another objective",
        )
    card = next(card for card in catalogue() if card.price is not None and card.price.unit == "USD/h")
    return replace(budget, gpu=card)


def free_host_bytes() -> int:
    """Memory of this machine that is free for the program, in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


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
        asked_at: seconds of the system's clock when the plan was asked for, from which on its search counts; 0 where
            that does not matter.
    """

    task: str = "plan"
    options: PlanOptions = field(default_factory=PlanOptions)
    fresh: bool = False
    asked_at: float = 0.0


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
        any_card: whether a card of another kind will do.
    """

    task: str = "measure"
    runs: tuple[AskedRun, ...]
    any_card: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyMemoryJob(PlannerJob):
    """Whether a plan's memory is what its file says."""

    task: str = "verify-memory"
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyValuesJob(PlannerJob):
    """Whether gradients and losses are what a plan promises.

    Attributes:
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
class ChooseTileJob(PlannerJob):
    """The quickest tile for a model and an input, which the target holds, within what torch may reserve.

    Attributes:
        memory: its budget is what torch may reserve, without the context.
    """

    task: str = "choose-tile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChooseChunkJob(PlannerJob):
    """The quickest size of chunks for a model and a call, which the target holds; `memory` as of a `ChooseTileJob`."""

    task: str = "choose-chunk"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureShapesJob(PlannerJob):
    """What shapes of batches take, for a model and items that the target holds; `memory` as of a `ChooseTileJob`."""

    task: str = "measure-shapes"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictBatchJob(PlannerJob):
    """The largest batch for a live model's own step, which the target holds; `memory` as of a `ChooseTileJob`."""

    task: str = "predict-batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPeakJob(PlannerJob):
    """What one call of a model takes on a card, which the target holds."""

    task: str = "request-peak"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceWeightsJob(PlannerJob):
    """The layers of a model that stay on the card for a use of it, which the target holds; `memory` as of a
    `ChooseTileJob`.
    """

    task: str = "place-weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTableJob(PlannerJob):
    """What a model takes with its layers in each format; `memory` as of a `ChooseTileJob`.

    Attributes:
        formats: by name.
    """

    task: str = "format-table"
    formats: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TryFormatsJob(PlannerJob):
    """What torch reserves with some choices of formats; `memory` as of a `ChooseTileJob`.

    Attributes:
        choices: formats of layers, by name, those that stay as they are left out.
        enough: choices that fit after which no more are run.
    """

    task: str = "try-formats"
    choices: tuple[dict[str, str], ...]
    enough: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentJob(PlannerJob):
    """Several jobs with the target, one after another, each in a folder of its own below; see resident_child.py."""

    task: str = "resident"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Generic[Found]):
    """What the child found.

    Attributes:
        card_here: whether this machine has a card.
    """

    found: Found
    card_here: bool
