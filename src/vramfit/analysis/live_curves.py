"""Live memory over time: of a whole run and of one step, and what several programs hold at once, shifted or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Ints, Measure
from vramfit.analysis._steps import StepSource, steps
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.trace import MemoryTrace

TICKS = 1 << 20
"""Parts that a step is divided into, so that steps of other lengths can be laid over each other."""
SHIFTS = 256
"""Shifts of a step that are tried, evenly over it."""
_PIECES = 2048
"""Pieces of a curve that a search looks at; of longer ones the highest of several pieces stands for them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveCurve:
    """Bytes that tensors hold over a stretch of time, constant between its times.

    Events of the same microsecond count with the highest of them, so that no peak is lost.

    Attributes:
        times: int64 array of shape [n], ascending without repeats, the first 0: where each value begins.
        bytes: int64 array of shape [n].
        rows: int64 array of shape [n]: the event of the trace that each value is from.
        length: where the last value ends, after the last time.
        unit_us: microseconds of one unit of time.
    """

    times: Ints
    bytes: Ints
    rows: Ints
    length: int
    unit_us: float = 1.0

    @property
    def peak(self) -> int:
        """The highest value."""
        return int(self.bytes.max())

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.length * self.unit_us / 1e6

    def at(self, moments: Ints) -> Ints:
        """Index of the value at each moment, which must lie from 0 to before `length`."""
        found: Ints = np.searchsorted(self.times, moments, side="right") - 1
        return found

    def divided(self, parts: int) -> LiveCurve:
        """The same over as many units of time, whatever it took; of values in one unit the highest stays."""
        return _collapsed(
            self.times * parts // self.length,
            self.bytes,
            self.rows,
            parts,
            self.unit_us * self.length / parts,
        )


def _collapsed(times: Ints, values: Ints, rows: Ints, length: int, unit_us: float) -> LiveCurve:
    """A curve of values at times that may repeat: the highest of each."""
    starts = np.flatnonzero(np.diff(times, prepend=times[0] - 1))
    highest = np.maximum.reduceat(values, starts)
    which = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    hits = np.flatnonzero(values == highest[which])
    first = hits[np.unique(which[hits], return_index=True)[1]]
    return LiveCurve(times=times[starts], bytes=highest, rows=rows[first], length=length, unit_us=unit_us)


def run_curve(trace: MemoryTrace, device: int = 0) -> LiveCurve:
    """Live bytes of a device over a whole run, from the first event to the last."""
    return _between(trace, device, -1, len(trace) - 1)


def step_curve(trace: MemoryTrace, device: int = 0) -> LiveCurve | None:
    """Live bytes of a device over the last whole step; None where the trace shows no steps.

    Only phases and marks count as steps. Of two steps the second is taken, up to the end of the trace: the first one
    lacks what an optimizer keeps.
    """
    found = steps(trace, device)
    if found.source not in (StepSource.PHASES, StepSource.MARKS) or len(found) < 2:
        return None
    begin, end = found.rows[-2:].tolist() if len(found) > 2 else (int(found.rows[-1]), len(trace) - 1)
    curve = _between(trace, device, begin, end)
    return curve if len(curve.times) > 1 else None


def _between(trace: MemoryTrace, device: int, first: int, last: int) -> LiveCurve:
    """The curve right after event ``first`` (-1 for the start) up to event ``last``."""
    timeline = DeviceTimeline.of(trace, device)
    rows = np.flatnonzero(trace.device == device)
    rows = rows[(rows > first) & (rows <= last)]
    before = int(timeline.curves.allocated[first]) if first >= 0 else _start(timeline)
    if not len(rows):
        return LiveCurve(
            times=np.zeros(1, dtype=np.int64),
            bytes=np.array([before], dtype=np.int64),
            rows=np.array([first], dtype=np.int64),
            length=1,
        )
    begin = int(trace.time_us[first]) if first >= 0 else int(trace.time_us[rows[0]])
    times = np.maximum.accumulate(
        np.maximum(trace.time_us[rows] - begin, 0)
    )  # clocks of recordings may go back
    values = timeline.curves.allocated[rows].astype(np.int64)
    times, values = np.append(0, times), np.append(before, values)
    return _collapsed(times, values, np.append(first, rows), int(times[-1]) + 1, 1.0)


def _start(timeline: DeviceTimeline) -> int:
    return timeline.curves.start[Measure.ALLOCATED]


@dataclass(frozen=True, kw_only=True, slots=True)
class JointPeak:
    """The most that several curves hold at once.

    Attributes:
        bytes: the sum at its highest.
        moment: when, in the unit of the curves.
        parts: what each curve holds then.
        rows: the event of each trace that its part is from; -1 for one that has not begun or is over.
    """

    bytes: int
    moment: int
    parts: tuple[int, ...]
    rows: tuple[int, ...]


def started_peak(curves: Sequence[LiveCurve], starts: Sequence[int]) -> JointPeak:
    """The most that runs hold at once, each begun at its time; before and after it holds nothing.

    Args:
        starts: in the unit of the curves.
    """
    moments = np.unique(
        np.concatenate([one.times + start for one, start in zip(curves, starts, strict=True)])
    )
    held = []
    for one, start in zip(curves, starts, strict=True):
        local = moments - start
        inside = (local >= 0) & (local < one.length)
        index = np.where(inside, one.at(np.clip(local, 0, one.length - 1)), -1)
        held.append(index)
    return _highest(curves, held, moments)


def stepped_peak(cycles: Sequence[LiveCurve], shifts: Sequence[int]) -> JointPeak:
    """The most that steps hold at once which repeat for ever, all of one length, each begun later by its shift."""
    length = cycles[0].length
    moments = np.unique(
        np.concatenate([(one.times + shift) % length for one, shift in zip(cycles, shifts, strict=True)])
    )
    held = [one.at((moments - shift) % length) for one, shift in zip(cycles, shifts, strict=True)]
    return _highest(cycles, held, moments)


def _highest(curves: Sequence[LiveCurve], held: Sequence[Ints], moments: Ints) -> JointPeak:
    """The peak of a sum, given the index of each curve's value at each moment; -1 for none."""
    parts = [
        np.where(index >= 0, one.bytes[np.maximum(index, 0)], 0)
        for one, index in zip(curves, held, strict=True)
    ]
    total = np.sum(parts, axis=0)
    at = int(total.argmax())
    return JointPeak(
        bytes=int(total[at]),
        moment=int(moments[at]),
        parts=tuple(int(part[at]) for part in parts),
        rows=tuple(
            int(one.rows[index[at]]) if index[at] >= 0 else -1
            for one, index in zip(curves, held, strict=True)
        ),
    )


def best_shifts(cycles: Sequence[LiveCurve], *, tries: int = SHIFTS) -> tuple[tuple[int, ...], JointPeak]:
    """Shifts of repeating steps of one length with which they hold the least at once, and that peak.

    The first is not shifted. Of two steps all of ``tries`` even shifts are compared; of more, each is placed after the
    ones before it, and then moved again while that helps. Never worse than no shifts at all.
    """
    length = cycles[0].length
    coarse = [one.divided(_PIECES) if len(one.times) > _PIECES else one for one in cycles]
    scaled = [
        LiveCurve(times=one.times * (length // one.length), bytes=one.bytes, rows=one.rows, length=length)
        if length % one.length == 0
        else whole
        for one, whole in zip(coarse, cycles, strict=True)
    ]
    shifts = [0] * len(cycles)
    for number in range(1, len(cycles)):
        shifts[number] = _best_of(scaled[: number + 1], shifts[: number + 1], number, tries)
    for number in _rounds(len(cycles)):
        shifts[number] = _best_of(scaled, shifts, number, tries)
    found = stepped_peak(cycles, shifts)
    plain = stepped_peak(cycles, [0] * len(cycles))
    return (tuple(shifts), found) if found.bytes < plain.bytes else ((0,) * len(cycles), plain)


def _rounds(count: int) -> Iterator[int]:
    """The curves to move again, twice each; two alone are at their best already."""
    if count > 2:
        yield from [*range(1, count)] * 2


def _best_of(cycles: Sequence[LiveCurve], shifts: Sequence[int], number: int, tries: int) -> int:
    """The shift of one curve with the lowest joint peak, the others as they are; the smallest of equals."""
    length = cycles[0].length
    options = sorted({length * part // tries for part in range(tries)})
    peaks = [
        stepped_peak(cycles, [*shifts[:number], option, *shifts[number + 1 :]]).bytes for option in options
    ]
    return options[int(np.argmin(peaks))]
