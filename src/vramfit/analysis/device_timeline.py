"""One device over the events of a trace: its blocks, curves and segments, worked out once for every analysis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from vramfit.analysis._lifetimes import (
    Curves,
    Flags,
    Ints,
    Lifetimes,
    curves,
    lifetimes,
    running,
    trace_device,
)
from vramfit.trace import Category, EventKind, MemoryTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSpans:
    """The stretches of address space that a device held, one array element each, sorted by address and birth.

    A segment of cudaMalloc is one element. Of an expandable segment, pages that were mapped and unmapped
    together are one element; neighbours that are mapped at the same moment make up one range then.

    Attributes:
        rows: number of events of the trace; a row of this value means "not within the trace".
        start, end: addresses, the end exclusive.
        born: row from which it was held; -1 if before the trace began.
        freed: row at which it was given back; ``rows`` if never.
        expandable: whether the span belongs to an expandable segment.
    """

    device: int
    rows: int
    start: Ints
    end: Ints
    born: Ints
    freed: Ints
    expandable: Flags

    def held(self, row: int) -> Ints:
        """Indices of the spans that are held right after event ``row``."""
        return np.flatnonzero((self.born <= row) & (row < self.freed))


def segment_spans(trace: MemoryTrace, device: int = 0) -> SegmentSpans:
    """The segments of ``device`` over the trace.

    Where the trace says what was held at its end, that decides: a recording may begin with segments in place.
    """
    whole = _whole_segments(trace, device)
    paged = _pages(trace, device)
    columns = [np.concatenate(pair) for pair in zip(whole, paged, strict=True)]
    expandable = np.repeat([False, True], [len(whole[0]), len(paged[0])])
    order = np.lexsort((columns[2], columns[0]))
    start, end, born, freed = (column[order] for column in columns)
    return SegmentSpans(
        device=device,
        rows=len(trace),
        start=start,
        end=end,
        born=born,
        freed=freed,
        expandable=expandable[order],
    )


def joined_ranges(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Ranges sorted by their beginning, as starts and ends, with those that touch or overlap as one."""
    reach = np.maximum.accumulate(high)
    begins = np.ones(len(low), dtype=bool)
    begins[1:] = low[1:] > reach[:-1]
    return low[begins], reach[np.roll(begins, -1)]


def _segment_events(
    trace: MemoryTrace, device: int, grow: EventKind, shrink: EventKind
) -> tuple[Ints, Flags]:
    """Rows of the two kinds of events on ``device``, and which of them grow."""
    kinds = trace.kind
    rows = np.flatnonzero((trace.device == device) & ((kinds == grow) | (kinds == shrink)))
    return rows, kinds[rows] == grow


def _final_segments(trace: MemoryTrace, device: int, *, expandable: bool) -> list[tuple[int, int]] | None:
    """Ranges of the segments at the end of the trace; None where the trace does not say.

    No segments at all say so only if the events agree: as much was given back as was taken, or more.
    """
    described = trace_device(trace, device)
    segments = described.segments if described else ()
    if not segments:
        return None if _net_growth(trace, device) > 0 else []
    return [
        (int(segment["address"]), int(segment["address"]) + int(segment["total_size"]))
        for segment in segments
        if bool(segment.get("is_expandable", False)) == expandable
    ]


def _net_growth(trace: MemoryTrace, device: int) -> int:
    """Bytes of segments taken over the trace less those given back."""
    total = 0
    for grow, shrink in (
        (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE),
        (EventKind.SEGMENT_MAP, EventKind.SEGMENT_UNMAP),
    ):
        rows, added = _segment_events(trace, device, grow, shrink)
        total += int(np.where(added, trace.size[rows], -trace.size[rows]).sum())
    return total


_Columns = tuple[Ints, Ints, Ints, Ints]


def _whole_segments(trace: MemoryTrace, device: int) -> _Columns:
    """Start, end, born and freed of what cudaMalloc gave."""
    rows, grows = _segment_events(trace, device, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)
    final = _final_segments(trace, device, expandable=False)
    start = trace.address[rows].astype(np.int64)
    key, born, freed = _paired(start, rows, grows, len(trace), _starts(final))
    # What was seen to come or go has the size of that event, the rest that of the end.
    last = dict(final or ())
    sizes = np.array([last.get(at, at) - at for at in key.tolist()], dtype=np.int64)
    seen = np.where(born >= 0, born, np.where(freed < len(trace), freed, -1))
    sizes = np.where(seen >= 0, trace.size[seen] if len(trace) else 0, sizes)
    return key, key + sizes, born, freed


def _pages(trace: MemoryTrace, device: int) -> _Columns:
    """Start, end, born and freed of the pages of expandable segments, like neighbours joined."""
    rows, grows = _segment_events(trace, device, EventKind.SEGMENT_MAP, EventKind.SEGMENT_UNMAP)
    final = _final_segments(trace, device, expandable=True)
    low = trace.address[rows].astype(np.int64)
    high = low + trace.size[rows]
    final_low = np.array([start for start, _ in final or ()], dtype=np.int64)
    final_high = np.array([end for _, end in final or ()], dtype=np.int64)
    edges = np.unique(np.concatenate([low, high, final_low, final_high]))
    # Between two neighbouring edges every event covers all or nothing.
    piece, event = _covered(edges, low, high)
    held = None if final is None else _covered(edges, final_low, final_high)[0]
    order = np.lexsort((rows[event], piece))
    piece, event = piece[order], event[order]
    key, born, freed = _paired(piece, rows[event], grows[event], len(trace), held)
    order = np.lexsort((born, key))
    return _joined(edges, key[order], born[order], freed[order])


def _covered(edges: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """The pieces between the edges that each range covers, and the range's index with each."""
    first, last = np.searchsorted(edges, low), np.searchsorted(edges, high)
    count = last - first
    which = np.repeat(np.arange(len(low)), count)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + offset, which


def _joined(edges: Ints, piece: Ints, born: Ints, freed: Ints) -> _Columns:
    """Neighbouring pieces with the same birth and end as one."""
    order = np.lexsort((piece, freed, born))
    piece, born, freed = piece[order], born[order], freed[order]
    begins = np.ones(len(piece), dtype=bool)
    begins[1:] = (piece[1:] != piece[:-1] + 1) | (born[1:] != born[:-1]) | (freed[1:] != freed[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(piece))[: len(starts)] - 1
    if not len(piece):
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, none
    return edges[piece[starts]], edges[piece[ends] + 1], born[starts], freed[starts]


def _starts(final: list[tuple[int, int]] | None) -> Ints | None:
    return None if final is None else np.array([start for start, _ in final], dtype=np.int64)


def _paired(key: Ints, rows: Ints, grows: Flags, end: int, final: Ints | None) -> tuple[Ints, Ints, Ints]:
    """Key, born and freed of each stay: a growing event of a key with the shrinking one that follows it.

    Args:
        key: the address or piece that each event concerns.
        rows: when it happened.
        grows: whether the event begins a stay.
        end: row of what does not end within the trace.
        final: the keys that stay at the end; None where that is not known.
    """
    order = np.lexsort((rows, key))
    key, rows, grows = key[order], rows[order], grows[order]
    same = key[1:] == key[:-1] if len(key) else np.zeros(0, dtype=bool)
    follows = np.zeros(len(key), dtype=bool)
    follows[1:] = same & grows[:-1] & ~grows[1:]
    ends = np.full(len(key), end, dtype=np.int64)
    ended = same & grows[:-1]
    ends[:-1][ended] = rows[1:][ended]
    keep = grows | ~follows
    found_key = key[keep]
    born = np.where(grows, rows, -1)[keep]
    freed = np.where(grows, ends, rows)[keep]
    if final is None:
        return found_key, born, freed
    certain = (freed < end) | np.isin(found_key, final)
    found_key, born, freed = found_key[certain], born[certain], freed[certain]
    missing = np.setdiff1d(final, found_key[freed == end])
    return (
        np.concatenate([found_key, missing]),
        np.concatenate([born, np.full(len(missing), -1, dtype=np.int64)]),
        np.concatenate([freed, np.full(len(missing), end, dtype=np.int64)]),
    )


class DeviceTimeline:
    """The blocks, the curves and the segments of one device of a trace, each computed on first use.

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
        return self.lives.category

    @cached_property
    def spans(self) -> SegmentSpans:
        """When each segment was held."""
        return segment_spans(self.trace, self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Allocated bytes by category over the events of a trace.

    Attributes:
        rows: the events at which the values hold, ascending.
        categories: array of shape [len(Category), len(rows)], indexed by `Category`; a column sums to ``allocated``.
    """

    rows: Ints
    time_us: Ints
    categories: Ints
    allocated: Ints
    reserved: Ints


def timeline(trace: MemoryTrace, device: int = 0, *, points: int | None = None) -> Timeline:
    """Allocated bytes by category over time.

    Args:
        points: at most about so many rows; of each stretch of events the one with the most allocated bytes is
            kept, so that no peak is lost. None keeps all.
    """
    bytes_over = DeviceTimeline.of(trace, device).curves
    rows = np.arange(len(trace), dtype=np.int64)
    if points is not None and len(trace) > points:
        rows = _highest_of_each(bytes_over.allocated, points)
    return timeline_at(trace, device, rows)


def timeline_at(trace: MemoryTrace, device: int, rows: Ints) -> Timeline:
    """Allocated bytes by category right after some events, in ascending order."""
    found = DeviceTimeline.of(trace, device)
    lives, bytes_over = found.lives, found.curves
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
