"""What the planner is asked: what a plan may take, and the job of its child with its answer. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.launch.job import Job
from vramfit.options.run_options import RunOptions

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
    """A question on its way to the child; see planner_questions.py.

    Attributes:
        question: its name; empty lets the child stay for several, each a job in a folder of its own below.
        values: the question as plain values; None where it is packed with the model.
        target: the workload that it is about, as ``FILE.py:NAME``.
        program: the command line of the program that it is about, in place of a workload; empty for none.
        run: how that program is run beside its card; None for the defaults.
        memory: where its steps are run, and what they may take.
        fresh: whether what earlier searches saw is left aside.
        asked_at: seconds of the system's clock when it was asked, from which on its time counts; 0 where that does not
            matter.
    """

    folder: str = ""
    question: str = ""
    values: dict[str, Any] | None = None
    target: str = ""
    program: tuple[str, ...] = ()
    run: RunOptions | None = None
    memory: DeviceMemory
    fresh: bool = False
    asked_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Generic[Found]):
    """What the child found.

    Attributes:
        card_here: whether this machine has a card.
    """

    found: Found
    card_here: bool
