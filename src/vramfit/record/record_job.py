"""How a program is recorded for real, and the job of the child that records it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.launch.program_job import ProgramJob, ProgramOptions

AUTO, CPU = "auto", "cpu"
"""Devices: the card of this machine, and its CPU, metered."""

MAX_ENTRIES = 1_000_000
"""Events that a recording of a card keeps unless another number is given: the last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun(ProgramOptions):
    """How a program is recorded.

    Attributes:
        device: ``auto`` and ``cuda`` for the card, ``cuda:1`` for a certain one, ``cpu`` to meter the CPU's tensors.
        budget: bytes that the program may hold; past them a request raises ``torch.OutOfMemoryError``.
        max_entries: events kept of a card.
    """

    device: str = AUTO
    budget: int | None = None
    max_entries: int = MAX_ENTRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordJob(ProgramJob):
    """A program to record.

    Attributes:
        device: ``auto``, ``cuda``, ``cuda:1`` or ``cpu``.
        budget: bytes past which a request is refused, None for no limit.
        max_entries: events kept of a card.
    """

    device: str
    budget: int | None
    max_entries: int
