"""What a plan is asked for, and the error that none fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramfit.errors import UsageError
from vramfit.planner.plans import Plan
from vramfit.techniques import Numerics, Technique, find_technique
from vramfit.workload import Workload

THROUGHPUT, MEMORY = "throughput", "memory"
"""Objectives: the quickest step, and the lowest peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        workload: without techniques.
        sizes: of the batch.
        budget_bytes: of the device, the CUDA context included.
        margin_bytes: of it, to be left free.
        host_bytes: of the host that may be spent.
        numerics: how far results may differ.
        objective: ``throughput`` or ``memory``.
        allowed: names of the techniques to choose from; None for all.
        forbidden: names of those that are left out.
        target: the workload's name as ``FILE.py:NAME``.
        time_limit: seconds for one solution of the program.
        entries: whether what each technique saves and costs is found by a run of its own.
        search_seconds: for the whole search; None for as long as it takes.
    """

    workload: Workload
    sizes: Mapping[str, int]
    budget_bytes: int
    margin_bytes: int = 0
    host_bytes: int = 0
    numerics: Numerics = Numerics.ROUNDING
    objective: str = THROUGHPUT
    allowed: frozenset[str] | None = None
    forbidden: frozenset[str] = frozenset()
    target: str = ""
    time_limit: float = 10.0
    entries: bool = True
    search_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse names that belong to no technique."""
        for name in (*sorted(self.allowed or ()), *sorted(self.forbidden)):
            find_technique(name)

    @property
    def limit(self) -> int:
        """Bytes that the run may take."""
        return self.budget_bytes - self.margin_bytes

    def may(self, technique: Technique[Any]) -> bool:
        """Whether a technique may be used."""
        if technique.name in self.forbidden:
            return False
        if self.allowed is None:
            return not technique.on_request
        return technique.name in self.allowed


class NothingFits(UsageError):
    """No plan stays within the budget.

    Attributes:
        plan: the one that came closest.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str, plan: Plan) -> None:
        super().__init__(message, hint)
        self.plan = plan
