"""The job of the recorder's child. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.launch.job import Job

AUTO = "auto"
"""The card of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordJob(Job):
    """What a child records.

    Attributes:
        device: ``auto``, ``cuda``, ``cuda:1`` or ``cpu``.
        budget: bytes past which a request is refused, None for no limit.
        max_entries: events kept of a card.
    """

    device: str = AUTO
    budget: int | None = None
    max_entries: int = 1_000_000
