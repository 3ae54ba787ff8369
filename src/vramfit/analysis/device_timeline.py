"""What follows from a trace for one device, worked out once and shared by every analysis and report of the trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from vramfit.analysis._curves import Curves, block_categories, curves, running
from vramfit.analysis._lifetimes import Ints, Lifetimes, lifetimes
from vramfit.analysis._segment_spans import SegmentSpans, segment_spans
from vramfit.trace import Category, MemoryTrace


class DeviceTimeline:
    """The blocks, the curves and the segments of one device of a trace, each worked out when it is first asked for.

    A trace never changes, so each of its devices has one timeline, which lasts as long as the trace.
    """

    _KNOWN: ClassVar[WeakKeyDictionary[MemoryTrace, dict[int, DeviceTimeline]]] = WeakKeyDictionary()

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        self.device = device
        self._trace = ref(trace)  # the trace is the key of _KNOWN: a strong reference would keep it for ever

    @classmethod
    def of(cls, trace: MemoryTrace, device: int = 0) -> DeviceTimeline:
        """The timeline of a device of a trace, always the same one."""
        devices = cls._KNOWN.setdefault(trace, {})
        return devices.setdefault(device, cls(trace, device))

    @property
    def trace(self) -> MemoryTrace:
        """The trace.

        Raises:
            ReferenceError: nobody holds the trace any more.
        """
        trace = self._trace()
        if trace is None:
            raise ReferenceError(
                "the trace of this timeline is gone: hold the trace as long as its timelines"
            )
        return trace

    @cached_property
    def lives(self) -> Lifetimes:
        """The blocks of the device."""
        return lifetimes(self.trace, self.device)

    @cached_property
    def curves(self) -> Curves:
        """Allocated, active and reserved bytes after each event."""
        return curves(self.trace, self.lives)

    @cached_property
    def categories(self) -> Ints:
        """The category of each block."""
        return block_categories(self.trace, self.lives)

    @cached_property
    def spans(self) -> SegmentSpans:
        """When each segment was held."""
        return segment_spans(self.trace, self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Allocated bytes by category over the events of a trace.

    Attributes:
        rows: the events at which the values hold, ascending.
        time_us: their times.
        categories: array of shape [8, len(rows)], indexed by `Category`; a column sums to ``allocated``.
        allocated: allocated bytes at those rows.
        reserved: reserved bytes at those rows.
    """

    rows: Ints
    time_us: Ints
    categories: Ints
    allocated: Ints
    reserved: Ints


def timeline(trace: MemoryTrace, device: int = 0, *, points: int | None = None) -> Timeline:
    """Allocated bytes by category over time.

    Args:
        trace: what happened.
        device: index of the device.
        points: at most about so many rows; of each stretch of events the one with the most allocated bytes is
            kept, so that no peak is lost. None keeps all.
    """
    found = DeviceTimeline.of(trace, device)
    lives, bytes_over = found.lives, found.curves
    rows = np.arange(lives.rows, dtype=np.int64)
    if points is not None and lives.rows > points:
        rows = _highest_of_each(bytes_over.allocated, points)
    stacked = np.zeros((len(Category), len(rows)), dtype=np.int64)
    for kind in Category:
        mine = found.categories == kind
        if mine.any():
            curve, _ = running(lives.born[mine], lives.freed[mine], lives.block[mine], lives.rows)
            stacked[kind] = curve[rows]
    return Timeline(
        rows=rows,
        time_us=trace.time_us[rows],
        categories=stacked,
        allocated=bytes_over.allocated[rows],
        reserved=bytes_over.reserved[rows],
    )


def _highest_of_each(values: Ints, points: int) -> Ints:
    """Index of the highest value in each of ``points`` stretches, with the first and the last index added."""
    starts = np.linspace(0, len(values), points, endpoint=False).astype(np.int64)
    lengths = np.diff(np.append(starts, len(values)))
    highest = np.repeat(np.maximum.reduceat(values, starts), lengths)
    hits = np.flatnonzero(values == highest)
    stretch = np.searchsorted(starts, hits, side="right")
    first = hits[np.unique(stretch, return_index=True)[1]]
    return np.unique(np.concatenate([[0], first, [len(values) - 1]])).astype(np.int64)
