"""Which sizes are tried to find the largest that fits: near a prediction first, and by measured peaks where there are.

NOTE [Next size]: sizes up to one that fits are taken to fit, and those above one that does not are taken not to. Where
something says what the largest is (a prediction, or the line through two measured peaks), its neighbours come first: a
prediction that is right costs two trials, one that is off by one at most three. From there steps grow eightfold until
the other side is met. Then, and where nothing says anything, sizes are doubled and the interval is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_REACH = (1, 1, 8, 64, 512, 4096)
"""Steps from a guess, in the direction that its trial points to."""

_FARTHEST = 4
"""A line through peaks is believed up to so many times the highest of them: small steps say little of large ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTrial:
    """Some steps at one size.

    Attributes:
        size: of the batch.
        fits: whether all steps ended, on all ranks.
        peak_bytes: that torch reserved at the highest; 0 where that is not known.
    """

    size: int
    fits: bool
    peak_bytes: int = 0


class BatchSearch:
    """The search for the largest size. See NOTE [Next size].

    Args:
        run: tries a size.
        start: where to begin.
        most: the largest size that is of use.
        predicted: whether `start` is a prediction.
        limit_bytes: that torch may reserve; 0 where that is not known.

    Attributes:
        trials: all, in order; each size is tried once.
        low: the largest size that fits, 0 before one did.
        high: the smallest that does not; `most` + 1 before one was seen.
    """

    def __init__(
        self,
        run: Callable[[int], BatchTrial],
        *,
        start: int,
        most: int,
        predicted: bool,
        limit_bytes: int = 0,
    ) -> None:
        self._run, self._limit = run, limit_bytes
        self.trials: list[BatchTrial] = []
        self.low, self.high = 0, most + 1
        self._most, self._start = most, min(start, most)
        self._ahead = list(_REACH) if predicted else []
        self._up, self._came = (
            True,
            False,
        )  # how the last trial ended, and whether it came by a step from a guess

    def largest(self) -> int:
        """The largest size that fits; 0 where none does."""
        while self.high - self.low > 1:
            trial = self._run(self._next())
            if self._came and trial.fits != self._up:
                self._ahead = []
            self.trials.append(trial)
            self._up = trial.fits
            if trial.fits:
                self.low = trial.size
            else:
                self.high = trial.size
        return self.low

    def _next(self) -> int:
        if not self.trials:
            return self._start
        if (guess := self._guess()) is not None:
            self._ahead, self._came = list(_REACH), False
            return guess
        if self._ahead:
            step, self._came = self._ahead.pop(0), True
            size = self.low + step if self._up else self.high - step
            if self.low < size < self.high:
                return size
        if self.low and self.high <= self._most:
            return (self.low + self.high) // 2
        return min(2 * self.low, self._most) if self.low else max(1, self.high // 2)

    def _guess(self) -> int | None:
        """The largest size by the line through the two largest measured peaks; None where that says nothing new."""
        known = sorted((one.size, one.peak_bytes) for one in self.trials if one.fits and one.peak_bytes)
        if not self._limit or len(known) < 2:
            return None
        (less, lower), (more, higher) = known[-2:]
        if higher <= lower or (self.high > self._most and _FARTHEST * higher < self._limit):
            return None
        guess = more + int((self._limit - higher) * (more - less) // (higher - lower))
        beside = guess in (self.low, self.high) or not self.low < guess < self.high
        return None if beside or guess - self.low < 2 else guess
