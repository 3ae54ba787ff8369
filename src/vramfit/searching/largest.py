"""The largest value that fits: doubles or halves, halves the interval, goes by predictions and by measured values.

NOTE [Next value]: values up to one that fits are taken to fit, and those above one that does not are taken not to.
Where something says what the largest is (a prediction, or the line through two measured values), its neighbours come
first: a prediction that is right costs two tries, one that is off by one at most three. From there steps grow until the
other side is met. Then, and where nothing says anything, the value is doubled or halved until one fits and one does
not, and the interval between them is halved down to neighbours. Where only some values are allowed, steps and halves
of intervals are counted in their positions, and twice or half a value is rounded down to an allowed one. So no more
than 2 log2(m) + 2 values are tried up to a largest allowed one of m, beside those by steps and by a line, whose numbers
the strategy and the line say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from vramfit.searching.allowed import Allowed, Multiples

A = TypeVar("A")

NEIGHBOURS_FIRST = (1, 1, 8, 64, 512, 4096)
"""Steps from a prediction that is usually right, in the direction that its try points to."""

DOUBLING_STEPS = tuple(1 << power for power in range(40))
"""Steps that double: from a value down, where runs above the largest are the expensive ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How the largest value is looked for.

    Attributes:
        allowed: the values that may be tried.
        start: the value that is tried first, or the largest allowed one up to it.
        steps: from there, in positions among the allowed values, one after another, each in the direction that the try
            before points to.
        closer: how far apart the largest that fits and the smallest that does not may be.
        part: the same as a part of the value that fits, one in so many; 0 for no such part.
        fails_above: whether what follows the last allowed value is known not to fit: nothing is doubled then.
    """

    allowed: Allowed
    start: int = 1
    steps: tuple[int, ...] = ()
    closer: int = 1
    part: int = 0
    fails_above: bool = False


def doubled_from(start: int, most: int, *, closer: int = 1) -> Strategy:
    """All values up to `most`, or up to the start where that is more: doubled from there, or halved."""
    start = max(1, start)
    return Strategy(allowed=Multiples(most=max(start, most)), start=start, closer=closer)


def down_from(start: int) -> Strategy:
    """The start first, and where it does not fit values below it, by steps that double."""
    return Strategy(allowed=Multiples(most=start), start=start, steps=DOUBLING_STEPS)


def halved(most: int) -> Strategy:
    """All values up to `most`, where the next is known to fail: the interval is halved from the start."""
    return Strategy(allowed=Multiples(most=most), start=(most + 1) // 2, fails_above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLine(Generic[A]):
    """A line through what was measured at the two largest values that fit: where it meets the limit, the end is near.

    Attributes:
        measured: what an answer says, e.g. peak bytes; 0 where it says nothing.
        limit: that a value may measure; 0 where it is not known, and then there is no line.
        farthest: a line is believed up to so many times the higher measured value: small values say little of large.
        steps: from the value that the line gives.
        most: times that a line is drawn: where measured values jump it may say little again and again.
    """

    measured: Callable[[A], int]
    limit: int
    farthest: int = 4
    steps: tuple[int, ...] = NEIGHBOURS_FIRST
    most: int = 16


class SearchEnd(Enum):
    """Why a search ended; its value is what that says of the largest."""

    NEXT_FAILS = "the next allowed value does not fit"
    ALL_FIT = "it is the largest that is allowed"
    CLOSE_ENOUGH = "what does not fit is as near as was asked for"
    NOTHING_FITS = "not even the smallest that is allowed fits"
    STOPPED = "the search was stopped: a larger one may fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTry(Generic[A]):
    """One value that was tried."""

    value: int
    fits: bool
    answer: A


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest(Generic[A]):
    """What a search found.

    Attributes:
        value: the largest that was seen to fit; 0 where none was.
        failing: the smallest that was seen not to fit; 0 where none was.
        ended: why no further value was tried.
        tries: all, in order; each value is tried once.
    """

    value: int
    failing: int
    ended: SearchEnd
    tries: tuple[ValueTry[A], ...]

    @property
    def confirmed(self) -> bool:
        """Whether no allowed value is left between the largest that fits and what ended the search."""
        return self.ended in (SearchEnd.NEXT_FAILS, SearchEnd.ALL_FIT, SearchEnd.NOTHING_FITS)

    @property
    def answer(self) -> A | None:
        """What was said of the largest that fits; None where none does."""
        return next((tried.answer for tried in self.tries if tried.fits and tried.value == self.value), None)


class LargestSearch(Generic[A]):
    """The search for the largest value that fits. See NOTE [Next value].

    Args:
        ask: tries a value: a function, or `Tries`, which remembers what others asked.
        fits: whether an answer says that the value fits. Where one does, all below it have to.
        strategy: which values are tried.
        line: what answers measure; None where they measure nothing.
        stop: asked before each try; the search ends where it is true.
    """

    def __init__(
        self,
        ask: Callable[[int], A],
        fits: Callable[[A], bool],
        strategy: Strategy,
        *,
        line: MeasuredLine[A] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ask, self._fits, self._strategy, self._line, self._stop = ask, fits, strategy, line, stop
        self._tries: list[ValueTry[A]] = []
        allowed = strategy.allowed
        self._first, self._last = allowed.first, allowed.last
        self._low, self._high = self._first - 1, self._last + 1  # positions: fits, does not
        self._ahead, self._guesses = list(strategy.steps), 0
        self._up, self._came = True, False  # how the last try ended, and whether it came by a step

    def run(self) -> Largest[A]:
        """Try values until the largest is known, or the search is stopped.

        What `ask` raises passes through; `result` then says what was seen before.
        """
        while not self._ended() and not self._stop():
            self._try(self._next())
        return self.result

    @property
    def result(self) -> Largest[A]:
        """What is known so far."""
        value_at = self._strategy.allowed.value_at
        return Largest(
            value=value_at(self._low) if self._low >= self._first else 0,
            failing=value_at(self._high) if self._high <= self._last else 0,
            ended=self._ended() or SearchEnd.STOPPED,
            tries=tuple(self._tries),
        )

    def _ended(self) -> SearchEnd | None:
        if self._high - self._low <= 1:
            if self._low < self._first:
                return SearchEnd.NOTHING_FITS
            return SearchEnd.NEXT_FAILS if self._high <= self._last else SearchEnd.ALL_FIT
        strategy = self._strategy
        if strategy.closer == 1 and not strategy.part:
            return None
        if self._low < self._first or self._high > self._last:
            return None
        low, high = strategy.allowed.value_at(self._low), strategy.allowed.value_at(self._high)
        part = strategy.part and low // strategy.part
        return SearchEnd.CLOSE_ENOUGH if high - low <= max(strategy.closer, part) else None

    def _try(self, position: int) -> None:
        value = self._strategy.allowed.value_at(position)
        answer = self._ask(value)
        fits = self._fits(answer)
        self._tries.append(ValueTry(value=value, fits=fits, answer=answer))
        if self._came and fits != self._up:
            self._ahead = []
        self._up = fits
        if fits:
            self._low = position
        else:
            self._high = position

    def _next(self) -> int:
        if not self._tries:
            start = self._strategy.allowed.position_of(self._strategy.start)
            return min(max(start, self._first), self._last)
        if self._line is not None and (guess := self._guess(self._line)) is not None:
            self._ahead, self._came = list(self._line.steps), False
            self._guesses += 1
            return guess
        if self._ahead:
            step, self._came = self._ahead.pop(0), True
            position = self._low + step if self._up else self._high - step
            if self._low < position < self._high:
                return position
        allowed = self._strategy.allowed
        if self._low < self._first:
            half = allowed.position_of(allowed.value_at(self._high) // 2)
            return max(self._first, min(half, self._high - 1))
        if self._high <= self._last or self._strategy.fails_above:
            return (self._low + self._high) // 2
        double = allowed.position_of(2 * allowed.value_at(self._low))
        return min(max(double, self._low + 1), self._last)

    def _guess(self, line: MeasuredLine[A]) -> int | None:
        """Position of the largest by the line; None where that says nothing new."""
        if not line.limit or self._guesses == line.most:
            return None
        measured = sorted(
            (tried.value, size)
            for tried in self._tries
            if tried.fits and (size := line.measured(tried.answer))
        )
        if len(measured) < 2:
            return None
        (less, lower), (more, higher) = measured[-2:]
        if higher <= lower or (self._high > self._last and line.farthest * higher < line.limit):
            return None
        value = more + int((line.limit - higher) * (more - less) // (higher - lower))
        guess = self._strategy.allowed.position_of(value)
        return guess if self._low + 1 < guess < self._high else None


def largest_where(holds: Callable[[int], bool], strategy: Strategy) -> Largest[bool]:
    """The largest value for which something holds; where it does for one it has to for all below."""
    return LargestSearch(holds, bool, strategy).run()
