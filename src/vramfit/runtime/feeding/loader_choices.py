"""What was measured of a loader's choices, and which of them is recommended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTrial:
    """One choice, measured.

    Attributes:
        workers: ``num_workers``.
        pinned: ``pin_memory``.
        rates: items per second of each round.
        first_seconds: until the first batch was there, the median of the rounds; starting workers is in it.
        worker_bytes: memory that one worker has for itself alone, the mean over them; None where it is not told.
        shared_bytes: the most by which ``/dev/shm`` grew meanwhile, whoever took it; None where there is none.
        error: what it failed with, in one line, or None.
    """

    workers: int
    pinned: bool
    rates: tuple[float, ...] = ()
    first_seconds: float = 0.0
    worker_bytes: int | None = None
    shared_bytes: int | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Items per second: the median of the rounds."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def bar(self) -> tuple[float, float]:
        """The slowest and the fastest round."""
        return (min(self.rates), max(self.rates)) if self.rates else (0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTrials:
    """All choices of a loader.

    Attributes:
        target: where the loader is, ``FILE.py:NAME``.
        cores: that this process may use.
        batches: of one pass.
        batch_items: in the first batch.
        card: whether batches were copied to one as well.
        trials: of workers, by their number; then those of pinned memory, where there is a card.
        given: as the loader is.
        recommended: of `trials`.
    """

    target: str
    cores: int
    batches: int
    batch_items: int
    card: bool
    trials: tuple[LoaderTrial, ...]
    given: LoaderTrial
    recommended: LoaderTrial


def recommended(trials: Sequence[LoaderTrial]) -> LoaderTrial:
    """The least that is not slower than the fastest by more than the rounds differ.

    That is the choice with the fewest workers, unpinned first, whose fastest round reaches the slowest one of the
    choice with the highest median. No workers come last: the steps have to wait while a batch is made.
    """
    working = [one for one in trials if one.error is None]
    fastest = max(working, key=lambda one: one.rate)
    near = [one for one in working if one.bar[1] >= fastest.bar[0]]
    return min(near, key=lambda one: (not one.workers, one.workers, one.pinned))
