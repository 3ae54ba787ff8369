"""Assigns each reserved byte that no request asked for to one cause, judged by one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import SMALL_REQUEST, Rounding
from vramfit.analysis._lifetimes import Lifetimes
from vramfit.analysis.occupancy import COMMON_POOL, Gap, HeldSegment, Occupancy
from vramfit.analysis.pinning import Pins
from vramfit.analysis.shortage import OomExplanation
from vramfit.trace import EventKind, MemoryTrace


class CauseKind(Enum):
    """Why bytes are reserved that no request asked for; LIVE_MEMORY says that those are not the problem."""

    LIVE_MEMORY = "live memory fills the card"
    LONG_LIVED_IN_HOLE = "longer-lived blocks lie in holes of earlier ones"
    INTERLEAVED = "longer-lived and shorter-lived blocks lie side by side"
    BESIDE_LIVE = "free memory beside live blocks, which keep it from being given back"
    """The same where only a state is known, and so no lifetimes."""
    GROWING_SIZES = "each request is larger than what the one before left"
    VARYING_SIZES = "requests of many different sizes"
    SMALLER_SEGMENTS = "free segments that are all smaller than the request"
    OTHER_STREAM = "free memory of another stream"
    PENDING_FREE = "freed blocks that wait for a stream"
    OTHER_POOL = "free memory of the other pool (small or large)"
    PRIVATE_POOL = "memory of a private pool"
    OVERSIZE_CACHED = "max_split_size_mb keeps large cached blocks from smaller requests"
    MAX_SPLIT_EXPANDABLE = "max_split_size_mb keeps free memory of expandable segments from being used"
    PAGE_EDGES = "free parts of pages that also hold live blocks"
    SEGMENT_REST = "the rest of the newest segment"
    UNSPLIT_SLACK = "blocks larger than their requests, since rests of at most 1 MiB are not split off"
    ROUNDING = "requests rounded up"
    CACHED = "free segments or pages, given back before memory runs out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request by which the causes are judged: the one that made the reserved memory grow last, or that failed.

    Attributes:
        row: the event of the request.
        size: bytes asked for.
        small: whether the request is for the small pool.
        failed: whether the request ran out of memory.
        grown: row of the segment event that it caused; -1 where it failed.
    """

    row: int
    size: int
    stream: int
    small: bool
    failed: bool
    grown: int


class Account:
    """The bytes of one moment, by cause.

    Attributes:
        request: the request by which gaps are judged.
        bytes, counts, largest: of each cause that occurs: all bytes, how many gaps or blocks, the largest of them.
        ranges: of each cause that live blocks beside free memory bring about: the gaps, and how much of each.
    """

    def __init__(
        self,
        lives: Lifetimes,
        held: Occupancy,
        config: AllocatorConfig,
        request: Request | None,
        pins: Pins,
        *,
        is_state: bool,
    ) -> None:
        """Go through all blocks and all gaps; ``is_state``: nothing is known of what was before."""
        self.is_state = is_state
        self.lives, self.held, self.config, self.request, self.pins = lives, held, config, request, pins
        self.rounding = Rounding(config)
        self.bytes: dict[CauseKind, int] = {}
        self.counts: dict[CauseKind, int] = {}
        self.largest: dict[CauseKind, int] = {}
        self.ranges: dict[CauseKind, list[tuple[Gap, int]]] = {}
        self._inside_blocks()
        whole = self._kind_of_whole_segments()
        for gap in held.gaps:
            self._gap(gap, whole)

    def _add(self, kind: CauseKind, size: int) -> None:
        if size:
            self.bytes[kind] = self.bytes.get(kind, 0) + size
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.largest[kind] = max(self.largest.get(kind, 0), size)

    def _add_pinned(self, kind: CauseKind, gap: Gap, size: int) -> None:
        self._add(kind, size)
        if size:
            self.ranges.setdefault(kind, []).append((gap, size))

    def _inside_blocks(self) -> None:
        """Rounding, slack, and blocks that wait for a stream."""
        lives, row = self.lives, self.held.row
        alive = lives.alive(row)
        size, block = lives.size[alive], lives.block[alive]
        distinct, index = np.unique(size, return_inverse=True)
        rounded = np.array([self.rounding.block(one) for one in distinct.tolist()], dtype=np.int64)
        rounded = np.minimum(rounded[index.reshape(-1)] if len(rounded) else size, block)
        for kind, extra in ((CauseKind.ROUNDING, rounded - size), (CauseKind.UNSPLIT_SLACK, block - rounded)):
            if extra.any():
                self.bytes[kind] = int(extra.sum())
                self.counts[kind] = int((extra > 0).sum())
                self.largest[kind] = int(extra.max())
        for waiting in np.setdiff1d(lives.active(row), alive).tolist():
            self._add(CauseKind.PENDING_FREE, int(lives.block[waiting]))

    def _gap(self, gap: Gap, whole: CauseKind) -> None:
        """Why one free range did not serve the request."""
        held, request = self.held, self.request
        segment = held.segments[gap.segment]
        if segment.pool_id != COMMON_POOL:
            self._add(CauseKind.PRIVATE_POOL, gap.size)
        elif request is None:
            self._by_pins(gap, whole)
        elif segment.stream != request.stream:
            self._add(CauseKind.OTHER_STREAM, gap.size)
        elif segment.small != request.small:
            self._add(CauseKind.OTHER_POOL, gap.size)
        elif held.is_rest(gap, request.grown):
            self._add(CauseKind.SEGMENT_REST, gap.size)
        elif gap.size >= self.rounding.block(request.size) and self.config.max_split_size is not None:
            kind = CauseKind.MAX_SPLIT_EXPANDABLE if segment.expandable else CauseKind.OVERSIZE_CACHED
            self._add(kind, gap.size)
        else:
            self._by_pins(gap, whole)

    def _by_pins(self, gap: Gap, whole: CauseKind) -> None:
        held = self.held
        pages = held.whole_pages(gap)
        segment = held.segments[gap.segment]
        if segment.expandable:
            self._add(CauseKind.CACHED, pages)
            self._add_pinned(CauseKind.PAGE_EDGES, gap, gap.size - pages)
        elif pages:
            self._add(whole, gap.size)
        else:
            beside = [block for block in (gap.before, gap.after) if block >= 0]
            hole = any(self.pins.in_hole[block] for block in beside)
            kind = CauseKind.LONG_LIVED_IN_HOLE if hole else CauseKind.INTERLEAVED
            kind = CauseKind.BESIDE_LIVE if self.is_state else kind
            self._add_pinned(kind, gap, gap.size)

    def _kind_of_whole_segments(self) -> CauseKind:
        """Why free segments of the request's own pool and stream did not serve it, judged by their sizes.

        Of the sizes in the order in which the segments were taken, nine of ten steps upwards make growing ones, and
        more than two different sizes varying ones.
        """
        request = self.request
        if request is None or request.small:
            return CauseKind.CACHED
        mine = [
            self.held.segments[gap.segment]
            for gap in self.held.gaps
            if self.held.is_whole(gap) and self._same_pool(self.held.segments[gap.segment], request)
        ]
        mine.sort(key=lambda segment: segment.born)
        sizes = [segment.size for segment in mine if segment.size < self.rounding.block(request.size)]
        if not sizes:
            return CauseKind.CACHED
        steps = np.diff(np.array([*sizes, self.rounding.segment(self.rounding.block(request.size))]))
        if len(set(sizes)) > 2 and (steps >= 0).mean() >= 0.9 and (steps > 0).any():
            return CauseKind.GROWING_SIZES
        return CauseKind.VARYING_SIZES if len(set(sizes)) > 2 else CauseKind.SMALLER_SEGMENTS

    def _same_pool(self, segment: HeldSegment, request: Request) -> bool:
        return (
            segment.pool_id == COMMON_POOL
            and segment.stream == request.stream
            and segment.small == request.small
            and not segment.expandable
        )


def request_at(
    trace: MemoryTrace, device: int, row: int, config: AllocatorConfig, oom: OomExplanation | None
) -> Request | None:
    """The request that failed, or the one that made the reserved memory of a device grow last, up to ``row``."""
    rounding = Rounding(config)
    if oom is not None:
        small = rounding.block(oom.requested) <= SMALL_REQUEST
        return Request(
            row=row,
            size=oom.requested,
            stream=oom.stream,
            small=small,
            failed=True,
            grown=-1,
        )
    here = (trace.device == device)[: row + 1]
    kinds = trace.kind[: row + 1]
    grown = np.flatnonzero(here & ((kinds == EventKind.SEGMENT_ALLOC) | (kinds == EventKind.SEGMENT_MAP)))
    if not len(grown):
        return None
    last = int(grown[-1])
    served = np.flatnonzero((trace.device[last:] == device) & (trace.kind[last:] == EventKind.ALLOC))
    if not len(served):
        return None
    at = last + int(served[0])
    size = int(trace.size[at])
    return Request(
        row=at,
        size=size,
        stream=int(trace.stream[at]),
        small=rounding.block(size) <= SMALL_REQUEST,
        failed=False,
        grown=last,
    )
