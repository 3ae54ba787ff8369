"""Keeps what was seen of each figure for some minutes, and says where it is heading.

NOTE [Holes]: what the allocator has reserved without using it, even at the peak, is of no use to the next step either,
but for whole segments, which it can give back. So holes are no more than either figure. A leak of 15 MiB a step takes a
segment of 20 MiB each time (c10/cuda/CUDACachingAllocator.cpp, kLargeBuffer): the holes grow with it. So where what is
allocated rises, and the holes do, both count towards the limit. Holes alone make no trend: a cache that fills is given
back before memory runs out.

NOTE [Warm-up]: a program's imports, the loading of its model and the first step's caches rise like a leak, for a while.
So nothing is estimated from the first seconds of a figure, and the host's begin anew with the first step, where steps
are known. And a rise or fall must go on: what has changed by less than half of its share towards the end is none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

from vramfit.watching.memory_trend import (
    LEAST,
    Point,
    SeriesTrend,
    maxima,
    step_maxima,
    thinned,
    trend_of,
    within,
)
from vramfit.watching.watch_reading import DeviceUse, Outlook, WatchReading

WINDOW = 300.0
"""Seconds of the past that a trend is drawn from."""

WARM_UP = 30.0
"""Seconds at the beginning of a figure that are left out. See NOTE [Warm-up]."""

_LATE_SHARE = 0.5
"""The least share of its mean rate at which a figure still rises in the last third of its time."""

_KEPT = 4096
"""Looks that are kept of a figure at most."""

_WASTED = 61
"""Looks of which the median says how much the holes between blocks take."""

_LEAST_SHARE = 2e-3
"""A rise over the window that is less than this share of the limit is no trend: 48 MiB of 24 GiB."""


@dataclass(slots=True)
class _Series:
    """The past of one figure.

    Attributes:
        seen: time, bytes, and the number of steps that had ended.
        after_steps: the same at the ends of steps.
        above: by how much the figure stood above its last end of a step, with the times.
        heights: by how much the peak of a step stood above its end, where that is known.
        wasted: bytes in holes. See NOTE [Holes].
        holes: the same at the ends of steps, by their numbers; of a program without steps by the time.
        records: peaks when they rose.
        begun: the time from which on it counts.
        peak: the process' own at the end of a step, as last seen.
        limit: bytes, as last seen.
    """

    seen: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    after_steps: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    above: deque[Point] = field(default_factory=lambda: deque(maxlen=_KEPT))
    heights: deque[Point] = field(default_factory=lambda: deque(maxlen=_KEPT))
    wasted: deque[int] = field(default_factory=lambda: deque(maxlen=_WASTED))
    holes: deque[Point] = field(default_factory=lambda: deque(maxlen=_KEPT))
    records: deque[Point] = field(default_factory=lambda: deque(maxlen=_KEPT))
    begun: float | None = None
    peak: int = 0
    limit: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """What a figure's future is reckoned from.

    Attributes:
        points: that the line goes through.
        trend: the line itself; None where there are too few points.
        growth: of what counts towards the limit: the line, and holes that grow with it.
        on_top: bytes above the line that a step needs.
        per_step: bytes that a step adds to the line; None without steps.
    """

    points: list[Point]
    trend: SeriesTrend | None = None
    growth: SeriesTrend | None = None
    on_top: float = 0.0
    per_step: float | None = None


class OutlookKeeper:
    """Says of each figure of a watch where it is heading.

    Args:
        window: seconds of the past that count.
        warm_up: seconds at the beginning of a figure that do not, of one that is not seen step by step.
    """

    def __init__(self, window: float = WINDOW, warm_up: float = WARM_UP) -> None:
        self._window, self._warm_up = window, warm_up
        self._stepped = False
        self._series: dict[str, _Series] = {}

    def look(self, reading: WatchReading) -> tuple[Outlook, ...]:
        """Take a reading in, and say where its figures are heading."""
        names: list[str] = []
        if not self._stepped and any(program.steps for program in reading.programs):
            self._stepped = True
            self._series.pop("host", None)  # what rose until now was set-up
        for program in reading.programs:
            for device in program.devices:
                several = f" of {program.pid}" if len(reading.programs) > 1 else ""
                name = f"allocated {device_name(device)}{several}"
                self._note_device(name, program.time, program.steps, device)
                names.append(name)
        for card in reading.cards:
            if not reading.programs:  # a process that does not say what its tensors hold
                names.append(name := f"used card {card.index}")
                held = (
                    card.used if card.own is None else card.own
                )  # in a container the driver hides processes
                self._note(name, reading.time, held, held + card.free)
        host = reading.host
        if host is not None:
            names.append(name := "host")
            left = host.available
            if host.limit is not None and host.limit_used is not None:
                left = min(left, max(0, host.limit - host.limit_used))
            self._note(name, reading.time, host.resident, host.resident + left)
        return tuple(self._outlook(name) for name in names)

    def _note(self, name: str, time: float, value: int, limit: int, step: int = 0) -> _Series:
        series = self._series.setdefault(name, _Series())
        series.limit = limit
        series.begun = time if series.begun is None else series.begun
        if not series.seen or series.seen[-1][0] < time:
            series.seen.append((time, float(value), step))
        return series

    def _note_device(self, name: str, time: float, steps: int, device: DeviceUse) -> None:
        series = self._note(name, time, device.allocated, device.limit, steps)
        if device.after_step is None:
            if device.peak > series.peak:
                if series.peak:  # the first was before the first look
                    series.records.append((time, float(device.peak)))
                series.peak = device.peak
            series.wasted.append(device.holes)
            series.holes.append((time, float(device.holes)))
            return
        if not series.after_steps:  # what was seen before the first step is of another kind
            series.holes.clear()
            series.wasted.clear()
            series.peak = 0
        ends = series.after_steps
        if not ends or (steps > ends[-1][2] and time > ends[-1][0]):
            ends.append((time, float(device.after_step), steps))
            series.holes.append((float(steps), float(device.holes)))
        # A peak that has risen from one end of a step to the next is that step's own.
        peak = device.step_peak or 0
        if peak > series.peak and series.peak:
            series.heights.append((time, float(peak - device.after_step)))
        series.peak = max(series.peak, peak)
        series.wasted.append(device.holes)
        series.above.append((time, max(0.0, float(device.allocated - device.after_step))))

    def _outlook(self, name: str) -> Outlook:
        series = self._series[name]
        line = self._line(series)
        points, trend = line.points, line.trend
        if trend is None:
            return Outlook(what=name, trend="unknown", limit=series.limit)
        length = points[-1][0] - points[0][0]
        least = _LEAST_SHARE * series.limit / length if length > 0 else 0.0
        plain = Outlook(
            what=name,
            trend="none",
            limit=series.limit,
            per_second=trend.slope,
            per_second_low=trend.low,
            per_second_high=trend.high,
            per_step=line.per_step,
        )
        if abs(trend.slope) < least or not (trend.rises or trend.falls):
            return plain
        if trend.falls:
            return replace(plain, trend="falling")
        seconds, low, high = _until(line.growth or trend, series.limit - line.on_top)
        passed = series.seen[-1][0] - points[-1][0]
        return replace(
            plain,
            trend="rising",
            seconds=max(0.0, seconds - passed),
            seconds_low=max(0.0, low - passed),
            seconds_high=None if high is None else max(0.0, high - passed),
        )

    def _line(self, series: _Series) -> _Line:
        """The points of the line, the line, and what comes on top.

        A leak is of a step, and steps may come faster or slower: so what a step adds is taken from the whole window,
        and how fast they come from its last third.
        """
        ends = list(series.after_steps)
        ends = ends[within(ends, self._window) :]
        if len(ends) >= 2:
            return self._line_of_steps(series, ends)
        counts_from = (series.begun or 0.0) + self._warm_up
        seen = [point for point in series.seen if point[0] >= counts_from]
        seen = seen[within(seen, self._window) :]
        if seen and seen[-1][2] > seen[0][2]:
            points = step_maxima(seen)
        else:
            points = maxima([(time, value) for time, value, _ in seen])
        trend = trend_of(thinned(points))
        if trend is not None and (trend.rises or trend.falls) and not _goes_on(points):
            return _Line(points=points, trend=replace(trend, slope=0.0, low=0.0, high=0.0))
        if trend is None or not trend.rises or not series.wasted:
            return _Line(points=points, trend=trend)
        growth, wasted = _with_holes(trend, series, points[0][0])
        last = points[-1][0]
        above = [
            value - trend.level - trend.slope * (time - last)
            for time, value in series.records
            if time >= points[0][0]
        ]
        return _Line(points=points, trend=trend, growth=growth, on_top=max([0.0, *above]) + wasted)

    def _line_of_steps(self, series: _Series, ends: list[tuple[float, float, int]]) -> _Line:
        """The line through the ends of steps. See NOTE [Holes]."""
        known = [value for time, value in series.heights if time >= ends[0][0]]
        above = known or [value for time, value in series.above if time >= ends[0][0]]
        points = [(time, value) for time, value, _ in ends]
        per_step = trend_of(thinned([(float(step), value) for _, value, step in ends]))
        recent = ends[-max(LEAST, len(ends) // 3) :]
        rate = trend_of(thinned([(time, float(step)) for time, _, step in recent]))
        if per_step is None or rate is None:
            return _Line(points=points)
        growth, wasted = _with_holes(per_step, series, ends[0][2])
        return _Line(
            points=points,
            trend=per_step.times(rate),
            growth=growth.times(rate),
            on_top=max(above, default=0.0) + wasted,
            per_step=per_step.slope,
        )


def _goes_on(points: list[Point]) -> bool:
    """Whether a rise or a fall lasts to the end, by the medians of its thirds. See NOTE [Warm-up]."""
    third = max(1, len(points) // 3)
    values = [value for _, value in points]
    first, middle, last = (median(part) for part in (values[:third], values[third:-third], values[-third:]))
    return last != first and (last - middle) * 2 / (last - first) >= _LATE_SHARE


def _with_holes(trend: SeriesTrend, series: _Series, begin: float) -> tuple[SeriesTrend, float]:
    """A line with the holes that grow beside it, and how much these take now. See NOTE [Holes].

    Args:
        begin: where the line begins.
    """
    wasted = float(sorted(series.wasted)[len(series.wasted) // 2])
    holes = trend_of(thinned([one for one in series.holes if one[0] >= begin]))
    if not trend.rises or holes is None or not holes.rises:
        return trend, wasted
    low, high = trend.low + holes.low, trend.high + holes.high
    return replace(trend, slope=trend.slope + holes.slope, low=low, high=high), max(0.0, holes.level)


def device_name(device: DeviceUse) -> str:
    """A device as people write it."""
    return "cpu" if device.kind == "metered" else f"cuda:{device.index}"


def _until(trend: SeriesTrend, limit: float) -> tuple[float, float, float | None]:
    found = trend.until(limit)
    assert found is not None  # of one that rises
    return found
