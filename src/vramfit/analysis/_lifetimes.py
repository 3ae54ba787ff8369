"""Pairs every allocation of a trace with its free, and sums the bytes held after each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from vramfit.trace import Category, EventKind, Frame, MemoryTrace, Segment, TraceDevice
from vramfit.trace.frame_categories import category_of

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: where a recording does not hold the size of a block, this
# is the multiple to which the request was rounded up.
_MIN_BLOCK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """The blocks of one device, one array element each, in no particular order.

    A block that came to count as another category is two: one that ends there, and one that begins.

    Attributes:
        rows: number of events of the trace; a row of this value means "not within the trace".
        born: row of the allocation, or from which it counted as another category; -1 for a block that was there before
            the trace began.
        freed: row at which the free was asked for; ``rows`` if never. From here on it no longer counts as
            allocated.
        completed: row at which the free took effect; ``rows`` if never. Until here it counts as active.
        size: bytes that were asked for.
        block: bytes of the block, which is what torch counts as allocated; block - size is slack.
        stack: index into the trace's stacks, -1 where nothing says who asked. A block from before the trace has the
            stack that the final segments give it.
        category: `Category` of the block; of one from before the trace as far as its stack tells.
    """

    device: int
    rows: int
    born: Ints
    freed: Ints
    completed: Ints
    address: NDArray[np.uint64]
    size: Ints
    block: Ints
    stack: Ints
    category: Ints

    def alive(self, row: int) -> Ints:
        """Indices of the blocks that count as allocated right after event ``row``."""
        return np.flatnonzero((self.born <= row) & (row < self.freed))

    def active(self, row: int) -> Ints:
        """Indices of the blocks that are allocated or wait for a stream to be free, right after ``row``."""
        return np.flatnonzero((self.born <= row) & (row < self.completed))


_BEGINNINGS = (EventKind.ALLOC, EventKind.RECATEGORIZED)


def lifetimes(trace: MemoryTrace, device: int = 0, begins: Sequence[EventKind] = _BEGINNINGS) -> Lifetimes:
    """Pair allocations and frees of ``device``.

    A free without an allocation, and a block of the final segments that was never allocated in the trace,
    was there from before the beginning: recordings are often switched on late.

    Args:
        begins: the events with which a block begins; of ALLOC alone a block is one, whatever it counted as.
    """
    rows = _rows_by_address(trace, device, begins)
    kind = trace.kind[rows]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = trace.address[rows[1:]] != trace.address[rows[:-1]]
    is_alloc, is_request = np.isin(kind, begins), kind == EventKind.FREE_REQUESTED
    next_row, next_is_request = _following(rows, is_first, is_request, len(trace))
    after_row = np.append(next_row[1:], len(trace))[: len(rows)]

    follows_alloc = np.zeros(len(rows), dtype=bool)
    follows_alloc[1:] = is_alloc[:-1] & ~is_first[1:]
    late_request = is_request & ~follows_alloc
    # Asked for before the trace began, so from its beginning active, but no longer allocated.
    late_completion = (kind == EventKind.FREE_COMPLETED) & is_first

    # Without its own completion, a free took effect at the latest when the address was used again.
    completed = np.where(is_alloc & next_is_request, after_row, next_row)
    keep = np.flatnonzero(is_alloc | late_request | late_completion)
    at = rows[keep]
    size, known = trace.size[at], trace.block[at]
    born = np.where(is_alloc, rows, -1)[keep]
    found = Lifetimes(
        device=device,
        rows=len(trace),
        born=born,
        freed=np.select([is_alloc, late_request], [next_row, rows], -1)[keep],
        completed=np.where(late_completion, rows, completed)[keep],
        address=trace.address[at],
        size=size,
        block=np.where(known > 0, known, -(-size // _MIN_BLOCK) * _MIN_BLOCK),
        stack=born_column(trace.stack, born),
        category=born_column(trace.category, born, unknown=int(Category.OTHER)),
    )
    return _with_survivors(found, trace)


def _rows_by_address(trace: MemoryTrace, device: int, begins: Sequence[EventKind]) -> Ints:
    """Rows of the allocations and frees of ``device``, sorted by address and, within one, by time."""
    wanted = np.isin(trace.kind, (*begins, EventKind.FREE_REQUESTED, EventKind.FREE_COMPLETED))
    rows = np.flatnonzero(wanted & (trace.device == device) & (trace.size > 0))
    return rows[np.argsort(trace.address[rows], kind="stable")]


def _following(rows: Ints, is_first: Flags, is_request: Flags, end: int) -> tuple[Ints, Flags]:
    """The next row at the same address (``end`` if there is none), and whether it asks for a free."""
    next_row = np.full(len(rows), end, dtype=np.int64)
    next_is_request = np.zeros(len(rows), dtype=bool)
    same = np.flatnonzero(~is_first[1:])
    next_row[same] = rows[same + 1]
    next_is_request[same] = is_request[same + 1]
    return next_row, next_is_request


def trace_device(trace: MemoryTrace, device: int) -> TraceDevice | None:
    """The trace's description of device ``device``, if it has one."""
    return next((found for found in trace.devices if found.index == device), None)


def _with_survivors(found: Lifetimes, trace: MemoryTrace) -> Lifetimes:
    """Add the blocks that the final segments hold although no event of the trace allocated them."""
    described = trace_device(trace, found.device)
    if described is None or not described.segments:
        return found
    known = set(found.address[found.completed == found.rows].tolist())
    extra: list[tuple[int, int, int, int, int, int]] = []
    asked = _Askers(trace)
    for segment in described.segments:
        cursor = int(segment["address"])
        for block in segment["blocks"]:
            here = int(block.get("address", cursor))
            cursor = here + int(block["size"])
            if here in known or not block["state"].startswith("active"):
                continue
            # A block that waits for a stream was given back before the trace began.
            freed = found.rows if block["state"] == "active_allocated" else -1
            requested, size = int(block.get("requested_size", block["size"])), int(block["size"])
            extra.append((here, requested, size, freed, *asked.of(block)))
    if not extra:
        return found
    address, requests, blocks, ends, stacks, kinds = (list(column) for column in zip(*extra, strict=True))
    before = np.full(len(extra), -1, dtype=np.int64)
    never = np.full(len(extra), found.rows, dtype=np.int64)
    return Lifetimes(
        device=found.device,
        rows=found.rows,
        born=np.concatenate([found.born, before]),
        freed=np.concatenate([found.freed, np.array(ends, dtype=np.int64)]),
        completed=np.concatenate([found.completed, never]),
        address=np.concatenate([found.address, np.array(address, dtype=np.uint64)]),
        size=np.concatenate([found.size, np.array(requests, dtype=np.int64)]),
        block=np.concatenate([found.block, np.array(blocks, dtype=np.int64)]),
        stack=np.concatenate([found.stack, np.array(stacks, dtype=np.int64)]),
        category=np.concatenate([found.category, np.array(kinds, dtype=np.int64)]),
    )


class _Askers:
    """Who asked for blocks of the final segments, by the frames that a snapshot keeps with them."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace
        self.stacks: dict[tuple[Frame, ...], int] | None = None

    def of(self, block: Segment) -> tuple[int, int]:
        """Index of the stack in the trace, -1 where there is none, and the category that it tells."""
        raw = block.get("frames")
        if not raw:
            return -1, int(Category.OTHER)
        if self.stacks is None:
            frames = self.trace.frames
            self.stacks = {
                tuple(frames[index] for index in stack): number
                for number, stack in enumerate(self.trace.stacks)
            }
        stack = tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in raw)
        return self.stacks.get(stack, -1), int(category_of(stack))


class Measure(Enum):
    """Which of the allocator's figures; the names are those of ``torch.cuda.memory_stats``."""

    ALLOCATED = "allocated"
    """Blocks handed out and not yet given back."""
    ACTIVE = "active"
    """Allocated, or given back but still awaited by a stream."""
    RESERVED = "reserved"
    """Segments held from the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """One value per event of the trace, in bytes, each as it is right after the event.

    Attributes:
        device: index of the device; events of other devices leave its values as they were.
        start: the value of each measure before the first event.
    """

    device: int
    allocated: Ints
    active: Ints
    reserved: Ints
    start: dict[Measure, int]

    def of(self, measure: Measure) -> Ints:
        """The curve of one measure."""
        curve: Ints = getattr(self, measure.value)
        return curve

    def peak(self, measure: Measure) -> int:
        """The highest value, counting the one before the first event."""
        curve = self.of(measure)
        return max(self.start[measure], int(curve.max()) if len(curve) else 0)


def curves(trace: MemoryTrace, lives: Lifetimes) -> Curves:
    """Allocated, active and reserved bytes of ``lives.device`` after each event of the trace."""
    allocated, allocated_start = running(lives.born, lives.freed, lives.block, lives.rows)
    active, active_start = running(lives.born, lives.completed, lives.block, lives.rows)
    here = trace.device == lives.device
    grows = here & ((trace.kind == EventKind.SEGMENT_ALLOC) | (trace.kind == EventKind.SEGMENT_MAP))
    shrinks = here & ((trace.kind == EventKind.SEGMENT_FREE) | (trace.kind == EventKind.SEGMENT_UNMAP))
    delta = np.where(grows, trace.size, 0) - np.where(shrinks, trace.size, 0)
    described = trace_device(trace, lives.device)
    final = sum(int(segment["total_size"]) for segment in described.segments) if described else 0
    # A recording that began late holds frees of segments that it did not see; its end is known.
    reserved_start = max(0, final - int(delta.sum()))
    return Curves(
        device=lives.device,
        allocated=allocated,
        active=active,
        reserved=reserved_start + np.cumsum(delta),
        start={
            Measure.ALLOCATED: allocated_start,
            Measure.ACTIVE: active_start,
            Measure.RESERVED: reserved_start,
        },
    )


def born_column(column: NDArray[np.generic], born: Ints, *, unknown: int = -1) -> Ints:
    """A column of a trace at the rows of allocation; ``unknown`` for blocks from before the trace."""
    if not len(column):
        return np.full(len(born), unknown, dtype=np.int64)
    return np.where(born >= 0, column[born], unknown).astype(np.int64)


def running(born: Ints, gone: Ints, block: Ints, rows: int) -> tuple[Ints, int]:
    """Sum of the blocks alive after each row, and before the first."""
    delta = np.zeros(rows + 1, dtype=np.int64)
    inside = born >= 0
    np.add.at(delta, born[inside], block[inside])
    ended = gone >= 0
    np.subtract.at(delta, gone[ended], block[ended])
    start = int(block[~inside & ended].sum())
    return start + np.cumsum(delta[:rows]), start
