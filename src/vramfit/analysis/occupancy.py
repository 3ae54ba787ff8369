"""What a device holds at one moment: segments, the blocks in them, and the gaps between, used or lost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vramfit.allocator.core import SMALL_SEGMENT
from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes
from vramfit.analysis.device_timeline import DeviceTimeline, SegmentSpans, joined_ranges
from vramfit.trace import MemoryTrace, Segment
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.replay.rewind import StartSegment, start_segments
from vramfit.trace.settings import recorded_config

PoolId = tuple[int, int]
COMMON_POOL: PoolId = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSegment:
    """A segment, or a mapped stretch of an expandable one.

    Attributes:
        address, size: address, and size in bytes.
        stream: the stream whose requests it serves.
        small: whether the segment belongs to the small pool.
        pool_id: its private pool, (0, 0) for the common one.
        page: for expandable segments the bytes that are mapped and unmapped at once; otherwise 0.
        born: row of the event that took it (the first one of a mapped stretch); -1 from before the trace.
        newest: row of the last event that took a part of it.
    """

    address: int
    size: int
    stream: int
    small: bool
    pool_id: PoolId
    page: int
    born: int
    newest: int

    @property
    def expandable(self) -> bool:
        """It grows by mapping pages."""
        return self.page > 0

    @property
    def end(self) -> int:
        """First address after it."""
        return self.address + self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A free range in a segment.

    Attributes:
        segment: index of the segment.
        address, size: address, and size in bytes.
        before, after: the blocks on both sides (indices into the lifetimes), -1 at an end of the segment.
    """

    segment: int
    address: int
    size: int
    before: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """One device at one moment.

    Attributes:
        row: the moment is right after this event.
        segments: the segments, by address.
        blocks: for each segment the blocks in it, by address, as indices into the lifetimes: allocated ones, and
            those that wait for a stream.
        gaps: the free ranges, by address.
    """

    row: int
    segments: tuple[HeldSegment, ...]
    blocks: tuple[tuple[int, ...], ...]
    gaps: tuple[Gap, ...]

    def is_whole(self, gap: Gap) -> bool:
        """Whether the gap is a whole free segment."""
        return not self.blocks[gap.segment]

    def is_rest(self, gap: Gap, grown: int) -> bool:
        """Whether a gap is what the segment event ``grown`` took beyond the request that it served.

        Args:
            gap: a free range.
            grown: row of the event that took memory for a request; -1 for none.
        """
        return grown >= 0 and self.segments[gap.segment].newest == grown and gap.after < 0

    def whole_pages(self, gap: Gap) -> int:
        """Bytes of a gap that can be given back: all of a free segment, or the whole pages of an expandable one."""
        segment = self.segments[gap.segment]
        if not segment.expandable:
            return gap.size if self.is_whole(gap) else 0
        # What is mapped begins and ends on a page.
        first = -(-(gap.address - segment.address) // segment.page)
        last = (gap.address + gap.size - segment.address) // segment.page
        return max(0, last - first) * segment.page


def occupancy(trace: MemoryTrace, lives: Lifetimes, row: int) -> Occupancy:
    """What ``lives.device`` holds right after event ``row``."""
    segments = held_segments(trace, lives.device, row)
    active = lives.active(row)
    address = lives.address[active].astype(np.int64)
    order = np.argsort(address, kind="stable")
    inside = active[order].tolist()
    begins = address[order].tolist()
    ends = (address[order] + lives.block[active[order]]).tolist()
    blocks: list[tuple[int, ...]] = []
    gaps: list[Gap] = []
    for index, segment in enumerate(segments):
        first, last = bisect_left(begins, segment.address), bisect_left(begins, segment.end)
        blocks.append(tuple(inside[first:last]))
        cursor, before = segment.address, -1
        for at in range(first, last):
            if begins[at] > cursor:
                gaps.append(
                    Gap(
                        segment=index,
                        address=cursor,
                        size=begins[at] - cursor,
                        before=before,
                        after=inside[at],
                    )
                )
            cursor, before = max(cursor, ends[at]), inside[at]
        if cursor < segment.end:
            gaps.append(
                Gap(segment=index, address=cursor, size=segment.end - cursor, before=before, after=-1)
            )
    return Occupancy(row=row, segments=segments, blocks=tuple(blocks), gaps=tuple(gaps))


def held_segments(trace: MemoryTrace, device: int, row: int) -> tuple[HeldSegment, ...]:
    """The segments that a device holds right after event ``row``, by address."""
    spans = DeviceTimeline.of(trace, device).spans
    pieces: list[HeldSegment] = []
    for piece in span_segments(trace, spans, spans.held(row)):
        expandable = piece.expandable
        before = pieces[-1] if pieces else None
        if before is not None and expandable and before.expandable and _continues(before, piece):
            pieces[-1] = replace(
                before,
                size=piece.end - before.address,
                born=min(before.born, piece.born),
                newest=max(before.newest, piece.born),
            )
        else:
            pieces.append(piece)
    return tuple(pieces)


def span_segments(trace: MemoryTrace, spans: SegmentSpans, chosen: Ints) -> Iterator[HeldSegment]:
    """The chosen spans, each as a segment of its own with what is known of its stream, its pool and its pages."""
    events = DeviceEvents(trace, spans.device)
    large_page = recorded_config(trace).large_segment_size
    first = _Described(start_segments(events))
    final = _Described(
        [_described(segment) for segment in sorted(events.final_segments, key=lambda found: found["address"])]
    )
    for index in chosen.tolist():
        address, end = int(spans.start[index]), int(spans.end[index])
        born, expandable = int(spans.born[index]), bool(spans.expandable[index])
        known = (first.at(address) if born < 0 else None) or (
            final.at(address) if spans.freed[index] == spans.rows else None
        )
        if born >= 0:
            taken = int(trace.size[born])
            small = bool(taken % large_page) if expandable else taken == SMALL_SEGMENT
            stream = int(trace.stream[born])
        else:
            small = known.small if known else end - address == SMALL_SEGMENT
            stream = known.stream if known else 0
        yield HeldSegment(
            address=address,
            size=end - address,
            stream=stream,
            small=small,
            pool_id=known.pool_id if known else COMMON_POOL,
            page=0 if not expandable else SMALL_SEGMENT if small else large_page,
            born=born,
            newest=born,
        )


def _continues(before: HeldSegment, piece: HeldSegment) -> bool:
    return before.end == piece.address and (before.stream, before.small) == (piece.stream, piece.small)


def _described(segment: Segment) -> StartSegment:
    return StartSegment(
        address=int(segment["address"]),
        size=int(segment["total_size"]),
        stream=int(segment.get("stream", 0)),
        small=segment.get("segment_type") == "small",
        pool_id=tuple(segment.get("segment_pool_id", COMMON_POOL)),
        expandable=bool(segment.get("is_expandable", False)),
    )


class _Described:
    """Segments of which stream and pool are known, by address."""

    def __init__(self, segments: list[StartSegment]) -> None:
        self.segments = segments
        self.begins = [segment.address for segment in segments]

    def at(self, address: int) -> StartSegment | None:
        index = bisect_right(self.begins, address) - 1
        found = self.segments[index] if index >= 0 else None
        return found if found is not None and address < found.end else None


def tenants(lives: Lifetimes, segment: HeldSegment, row: int, order: Ints) -> Ints:
    """All blocks that have lain in a segment since it was taken, up to ``row``; ``order`` sorts the lifetimes."""
    address = lives.address[order]
    first = int(np.searchsorted(address, np.uint64(segment.address)))
    last = int(np.searchsorted(address, np.uint64(segment.end)))
    inside = order[first:last]
    return inside[(lives.born[inside] <= row) & (lives.completed[inside] > segment.born)]


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
        segments: number of segments held.
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
    spans = DeviceTimeline.of(trace, lives.device).spans
    held = spans.held(row)
    mapped = spans.expandable[held]
    start, end = spans.start[held], spans.end[held]
    whole = _gaps(start[~mapped], end[~mapped], lives, occupied)
    paged = _gaps(*joined_ranges(start[mapped], end[mapped]), lives, occupied)
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
    """The sizes of free ranges within segments; ``is_whole`` marks those that are a whole segment."""

    size: Ints
    is_whole: Flags
    reserved: int
    segments: int


def _gaps(starts: Ints, ends: Ints, lives: Lifetimes, occupied: Ints) -> _Gaps:
    """What no occupied block covers of the segments (sorted, disjoint)."""
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
    size = np.concatenate([begin - before, (ends[home] - finish)[is_last], (ends - starts)[empty]])
    is_whole = np.arange(len(size)) >= len(size) - len(empty)
    keep = size > 0
    return _Gaps(size=size[keep], is_whole=is_whole[keep], reserved=reserved, segments=len(starts))
