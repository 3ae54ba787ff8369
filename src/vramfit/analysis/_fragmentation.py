"""What of the reserved memory is free at one moment, and whether it could be used or given back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes
from vramfit.analysis._segment_spans import final_segments, segment_events
from vramfit.analysis.occupancy import occupancy
from vramfit.trace import EventKind, MemoryTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation:
    """Reserved memory at one moment, in bytes: ``reserved = occupied + inactive_split + releasable``.

    Attributes:
        reserved: segments held from the driver.
        occupied: blocks that are allocated or wait for a stream.
        inactive_split: free, but in a segment that also holds a live block: it can serve only requests that
            fit into one of its gaps, and cannot be given back to the driver.
        releasable: segments that are wholly free, or whole free pages of expandable ones: the allocator
            gives them back before it runs out.
        largest_free: the largest request that could be served without asking the driver.
        slack: bytes inside occupied blocks that nobody asked for (rounding, and rests too small to split
            off).
        segments: how many segments are held.
    """

    reserved: int
    occupied: int
    inactive_split: int
    releasable: int
    largest_free: int
    slack: int
    segments: int

    @property
    def ratio(self) -> float:
        """Share of the reserved bytes that is free but cannot be given back."""
        return self.inactive_split / self.reserved if self.reserved else 0.0


def fragmentation(trace: MemoryTrace, lives: Lifetimes, row: int) -> Fragmentation:
    """How the reserved memory of ``lives.device`` is used right after event ``row``."""
    occupied = lives.active(row)
    slack = int((lives.block[occupied] - lives.size[occupied]).sum())
    whole = _gaps(*_classic_segments(trace, lives.device, row), lives, occupied)
    paged = _gaps(*_mapped_ranges(trace, lives.device, row), lives, occupied)
    pages = _free_pages(trace, lives, row) if len(paged.size) else 0
    free = int(whole.size.sum() + paged.size.sum())
    reserved = int(whole.reserved + paged.reserved)
    releasable = int(whole.size[whole.is_whole].sum()) + pages
    return Fragmentation(
        reserved=reserved,
        occupied=reserved - free,
        inactive_split=free - releasable,
        releasable=releasable,
        largest_free=int(max(whole.size.max(initial=0), paged.size.max(initial=0))),
        slack=slack,
        segments=whole.segments + paged.segments,
    )


def _free_pages(trace: MemoryTrace, lives: Lifetimes, row: int) -> int:
    """Bytes of the whole pages in free gaps of expandable segments: these can be unmapped."""
    held = occupancy(trace, lives, row)
    return sum(held.whole_pages(gap) for gap in held.gaps if held.segments[gap.segment].expandable)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gaps:
    """Free ranges within segments; ``is_whole`` marks those that are a whole segment."""

    start: Ints
    size: Ints
    is_whole: Flags
    reserved: int
    segments: int


def _gaps(starts: Ints, ends: Ints, lives: Lifetimes, occupied: Ints) -> _Gaps:
    """The ranges of the segments (sorted, disjoint) that no occupied block covers."""
    reserved = int((ends - starts).sum())
    address = lives.address[occupied].astype(np.int64)
    order = np.argsort(address)
    begin = address[order]
    finish = begin + lives.block[occupied][order]
    home = np.searchsorted(starts, begin, side="right") - 1
    inside = home >= 0
    inside[inside] = begin[inside] < ends[home[inside]]
    begin, finish, home = begin[inside], finish[inside], home[inside]
    is_first = np.ones(len(begin), dtype=bool)
    is_first[1:] = home[1:] != home[:-1]
    is_last = np.ones(len(begin), dtype=bool)
    is_last[:-1] = is_first[1:]
    before = np.where(is_first, starts[home], np.concatenate([begin[:1], finish[:-1]]))
    empty = np.setdiff1d(np.arange(len(starts)), home)
    gap_start = np.concatenate([before, finish[is_last], starts[empty]])
    gap_end = np.concatenate([begin, ends[home[is_last]], ends[empty]])
    is_whole = np.zeros(len(gap_start), dtype=bool)
    is_whole[len(gap_start) - len(empty) :] = True
    keep = gap_end > gap_start
    return _Gaps(
        start=gap_start[keep],
        size=(gap_end - gap_start)[keep],
        is_whole=is_whole[keep],
        reserved=reserved,
        segments=len(starts),
    )


def _classic_segments(trace: MemoryTrace, device: int, row: int) -> tuple[Ints, Ints]:
    """Start and end of the segments that cudaMalloc gave, as they are after ``row``."""
    live: dict[int, int] = {}
    final = final_segments(trace, device, expandable=False)
    rows, added = segment_events(trace, device, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)
    if final is None:
        chosen, forward = np.flatnonzero(rows <= row), True
    else:
        # A recording may begin with segments in place; its end is known, so it is walked back from there.
        live.update((start, end - start) for start, end in final)
        chosen, forward = np.flatnonzero(rows > row)[::-1], False
    chosen_rows = rows[chosen]
    for address, size, grows in zip(
        trace.address[chosen_rows].tolist(),
        trace.size[chosen_rows].tolist(),
        added[chosen].tolist(),
        strict=True,
    ):
        if grows == forward:
            live[address] = size
        else:
            live.pop(address, None)
    starts = np.array(sorted(live), dtype=np.int64)
    return starts, starts + np.array([live[start] for start in starts.tolist()], dtype=np.int64)


def _mapped_ranges(trace: MemoryTrace, device: int, row: int) -> tuple[Ints, Ints]:
    """Start and end of the contiguous mapped ranges of expandable segments, as they are after ``row``."""
    final = final_segments(trace, device, expandable=True)
    rows, added = segment_events(trace, device, EventKind.SEGMENT_MAP, EventKind.SEGMENT_UNMAP)
    sign = np.where(added, 1, -1)
    chosen = rows <= row
    if final is not None:
        chosen, sign = rows > row, -sign
    low = trace.address[rows[chosen]].astype(np.int64)
    high = low + trace.size[rows[chosen]]
    weight = sign[chosen]
    if final:
        low = np.concatenate([low, np.array([start for start, _ in final], dtype=np.int64)])
        high = np.concatenate([high, np.array([end for _, end in final], dtype=np.int64)])
        weight = np.concatenate([weight, np.ones(len(final), dtype=np.int64)])
    edges = np.unique(np.concatenate([low, high]))
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, low), weight)
    np.subtract.at(change, np.searchsorted(edges, high), weight)
    mapped = np.cumsum(change) > 0
    turns = np.diff(np.concatenate([[False], mapped, [False]]).astype(np.int8))
    # The last edge never begins a range, so the turn after the last element cannot occur.
    return edges[np.flatnonzero(turns == 1)], edges[np.flatnonzero(turns == -1)]
