"""What a comparison of a plan with the plain program came to, and workloads that compare themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vramfit.planner.plans import Plan
from vramfit.planner.search_clock import SearchClock
from vramfit.techniques import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The result of a comparison.

    Attributes:
        note: what was compared and how it ended, or why nothing was; a sentence, empty where there is nothing to say.
        fault: the technique that does not keep its promise; None where all do, or nothing was compared.
        by: what was compared, in words; empty where nothing was.
    """

    note: str = ""
    fault: Choice | None = None
    by: str = ""


@runtime_checkable
class ComparesItself(Protocol):
    """A workload whose parts nobody can run apart, such as a program."""

    def check_promises(self, plan: Plan, clock: SearchClock) -> Compared:
        """Hold a plan's techniques to their promises."""
        ...
