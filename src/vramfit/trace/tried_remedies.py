"""What was tried on a program that does not fit: each remedy with its peak, its time and how to do it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedRemedy:
    """One remedy, as the program ran with it.

    Attributes:
        name: in the field's words.
        how: what to do in the program's own words, a line each: an argument, a line to insert and where, a variable.
        changes: what it changes in the results; empty where nothing.
        total_bytes: of the card, the CUDA context included; 0 where it failed.
        peak_allocated_bytes, peak_reserved_bytes: most that tensors, and the allocator, held.
        fits: whether that stays within the card; None where it failed.
        step_seconds: simulated; 0 where it did not come to the end of a step.
        plain_step_seconds: of the program as it is.
        failed: why it could not be run; empty where it was.
    """

    name: str
    how: tuple[str, ...] = ()
    changes: str = ""
    total_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    fits: bool | None = None
    step_seconds: float = 0.0
    plain_step_seconds: float = 0.0
    failed: str = ""

    @property
    def slower(self) -> float | None:
        """The step's time as a multiple of the plain one's; None where either is unknown."""
        if not self.step_seconds or not self.plain_step_seconds:
            return None
        return self.step_seconds / self.plain_step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedRemedies:
    """All that was tried.

    Attributes:
        rows: in the order in which they were tried; the first is the program as it is.
        cheapest: number of the row that fits and costs least, None where none fits.
        seconds: that it took.
        cut: whether there was no time for all.
        why_not: why nothing was tried; empty where something was.
        whole: whether each ran to its end, as a program that trains nothing does, and not for two steps of a training;
            seconds are then those of the whole.
    """

    rows: tuple[TriedRemedy, ...] = ()
    cheapest: int | None = None
    seconds: float = 0.0
    cut: bool = False
    why_not: str = ""
    whole: bool = False
