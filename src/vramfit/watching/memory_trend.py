"""Where a series of figures is heading: a robust slope with its bar, and when it reaches a limit.

NOTE [Sawtooth]: a training's memory rises and falls within each step, many times what a leak adds. So a series is
first reduced to its maxima: one for each step where steps are known, else one for each of 24 equal parts of the window,
at the time at which it was seen. The line goes through those.

The slope is that of Theil and Sen, the median of the slopes of all pairs, and its interval is the one of Sen
("Estimates of the regression coefficient based on Kendall's tau", J. Am. Stat. Assoc. 63, 1968): a pair of ranks around
the middle. Up to 29 % of the points may be wrong without moving it far. There is a trend only if the interval leaves
out zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

PARTS = 24
"""Parts of a window of which each gives its maximum."""

LEAST = 8
"""Fewest maxima that make a trend: with fewer, Sen's interval is wider than the slopes that there are."""

_Z = 1.959964
"""Of the two-sided 95 % of a normal distribution."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesTrend:
    """A line through the maxima of a series.

    Attributes:
        slope, low, high: per unit of the first coordinate, and the bounds of the 95 % interval.
        level: at the last point: of a line of that slope through the last eight.
        points: how many maxima it goes through.
    """

    slope: float
    low: float
    high: float
    level: float
    points: int

    @property
    def rises(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0

    @property
    def falls(self) -> bool:
        """Whether the whole interval lies below zero."""
        return self.high < 0

    def until(self, limit: float) -> tuple[float, float, float | None] | None:
        """How far it is to a limit, with the near and the far bound; None where the line does not rise.

        The far bound is None where the slope could be nothing.
        """
        if not self.rises:
            return None
        room = max(0.0, limit - self.level)
        return room / self.slope, room / self.high, room / self.low

    def times(self, rate: SeriesTrend) -> SeriesTrend:
        """The same per unit of another quantity, where this one is per unit of what that rate is of."""
        low, high = max(0.0, rate.low), max(0.0, rate.high)
        bounds = [self.low * low, self.low * high, self.high * low, self.high * high]
        return replace(self, slope=self.slope * rate.slope, low=min(bounds), high=max(bounds))


def maxima(series: Sequence[Point], parts: int = PARTS) -> list[Point]:
    """The largest point of each of some equal parts of the time. See NOTE [Sawtooth]."""
    if len(series) <= parts:
        return list(series)
    begin, length = series[0][0], series[-1][0] - series[0][0]
    found: dict[int, Point] = {}
    for time, value in series:
        part = min(parts - 1, int((time - begin) / length * parts)) if length > 0 else 0
        if part not in found or value > found[part][1]:
            found[part] = time, value
    return [found[part] for part in sorted(found)]


def step_maxima(series: Iterable[tuple[float, float, int]]) -> list[Point]:
    """The largest point of each whole step of a series of time, value and step; the one that still runs is left out."""
    found: dict[int, Point] = {}
    last = 0
    for time, value, step in series:
        last = step
        if step not in found or value > found[step][1]:
            found[step] = time, value
    found.pop(last, None)
    return [found[step] for step in sorted(found)]


def trend_of(points: Sequence[Point]) -> SeriesTrend | None:
    """The line through some points, in the order of their first coordinate; None where there are too few."""
    count = len(points)
    if count < LEAST:
        return None
    slopes = sorted(
        (points[right][1] - points[left][1]) / (points[right][0] - points[left][0])
        for left in range(count)
        for right in range(left + 1, count)
        if points[right][0] > points[left][0]
    )
    if not slopes:
        return None
    slope = _median(slopes)
    # Sen 1968; the variance is Kendall's, less what ties of the values take off.
    spread = _Z * math.sqrt(_variance([value for _, value in points]))
    low = max(0, math.floor((len(slopes) - spread) / 2) - 1)
    high = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    # Of the last points: where the slope has changed, a line through all of them ends above or below the last.
    middle = _median(sorted(value - slope * time for time, value in points[-LEAST:]))
    return SeriesTrend(
        slope=slope,
        low=slopes[low],
        high=slopes[high],
        level=middle + slope * points[-1][0],
        points=count,
    )


def thinned(points: Sequence[Point], most: int = 60) -> list[Point]:
    """No more than so many points, evenly spread: the number of pairs grows as the square."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def within(series: Sequence[tuple[float, ...]], seconds: float) -> int:
    """Where the last so many seconds of a series of times begin."""
    return bisect_left(series, series[-1][0] - seconds, key=lambda one: one[0]) if series else 0


def _variance(values: Sequence[float]) -> float:
    count = len(values)
    ties = [values.count(value) for value in set(values)]
    whole = count * (count - 1) * (2 * count + 5)
    return (whole - sum(tied * (tied - 1) * (2 * tied + 5) for tied in ties)) / 18


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
