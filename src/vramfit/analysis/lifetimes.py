"""Pairs every allocation of a trace with its free: the lifetimes from which all other analyses follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramfit.trace import EventKind, MemoryTrace, TraceDevice

Ints = NDArray[np.int64]

# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: where a recording does not hold the size of a block, this
# is the multiple to which the request was rounded up.
_MIN_BLOCK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """The blocks of one device, one array element each, in no particular order.

    Attributes:
        device: index of the device.
        rows: number of events of the trace; a row of this value means "not within the trace".
        born: row of the allocation; -1 for a block that was there before the trace began.
        freed: row at which the free was asked for; ``rows`` if never. From here on it no longer counts as
            allocated.
        completed: row at which the free took effect; ``rows`` if never. Until here it counts as active.
        address: where the block lies.
        size: bytes that were asked for.
        block: bytes of the block, which is what torch counts as allocated; block - size is slack.
    """

    device: int
    rows: int
    born: Ints
    freed: Ints
    completed: Ints
    address: NDArray[np.uint64]
    size: Ints
    block: Ints

    def alive(self, row: int) -> Ints:
        """Indices of the blocks that count as allocated right after event ``row``."""
        return np.flatnonzero((self.born <= row) & (row < self.freed))

    def active(self, row: int) -> Ints:
        """Indices of the blocks that are allocated or wait for a stream to be free, right after ``row``."""
        return np.flatnonzero((self.born <= row) & (row < self.completed))


def lifetimes(trace: MemoryTrace, device: int = 0) -> Lifetimes:
    """Pair allocations and frees of ``device``.

    A free without an allocation, and a block of the final segments that was never allocated in the trace,
    was there from before the beginning: recordings are often switched on late.
    """
    kinds = trace.kind
    wanted = (
        (trace.device == device)
        & (trace.size > 0)
        & (
            (kinds == EventKind.ALLOC)
            | (kinds == EventKind.FREE_REQUESTED)
            | (kinds == EventKind.FREE_COMPLETED)
        )
    )
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(trace.address[rows], kind="stable")]
    address, kind = trace.address[rows], kinds[rows]
    end = len(trace)

    def following(steps: int) -> tuple[Ints, NDArray[np.uint8]]:
        """Row and kind of the event ``steps`` later at the same address; ``end`` and 255 if there is none."""
        later_row = np.full(len(rows), end, dtype=np.int64)
        later_kind = np.full(len(rows), 255, dtype=np.uint8)
        same = np.flatnonzero(address[steps:] == address[: len(rows) - steps])
        later_row[same] = rows[same + steps]
        later_kind[same] = kind[same + steps]
        return later_row, later_kind

    next_row, next_kind = following(1)
    after_row, after_kind = following(2)
    is_alloc = kind == EventKind.ALLOC
    # Without its own completion, a free took effect at once if the address was used again or nothing ever
    # completes.
    completes = bool((kind == EventKind.FREE_COMPLETED).any())
    unfinished = (next_kind == EventKind.FREE_REQUESTED) & (after_kind != EventKind.FREE_COMPLETED)
    completed = np.where(next_kind == EventKind.FREE_REQUESTED, after_row, next_row)
    completed = np.where(unfinished & ((after_row < end) | (not completes)), next_row, completed)

    previous_alloc = np.zeros(len(rows), dtype=bool)
    if len(rows) > 1:
        previous_alloc[1:] = is_alloc[:-1] & (address[1:] == address[:-1])
    first_of_address = np.ones(len(rows), dtype=bool)
    first_of_address[1:] = address[1:] != address[:-1]
    orphan_request = (kind == EventKind.FREE_REQUESTED) & ~previous_alloc
    orphan_completion = (kind == EventKind.FREE_COMPLETED) & first_of_address
    orphan = orphan_request | orphan_completion
    # The orphan's own row is its free; what follows it at the address may be its completion.
    orphan_completed = np.where(orphan_request & (next_kind == EventKind.FREE_COMPLETED), next_row, rows)
    # A free that was asked for before the trace began is active, but no longer allocated.
    orphan_freed = np.where(orphan_completion, -1, rows)

    keep = np.flatnonzero(is_alloc | orphan)
    allocated = is_alloc[keep]
    at = rows[keep]
    size = trace.size[at]
    known = trace.block[at]
    block = np.where(known > 0, known, -(-size // _MIN_BLOCK) * _MIN_BLOCK)
    found = Lifetimes(
        device=device,
        rows=end,
        born=np.where(allocated, at, -1),
        freed=np.where(allocated, next_row[keep], orphan_freed[keep]),
        completed=np.where(allocated, completed[keep], orphan_completed[keep]),
        address=address[keep],
        size=size,
        block=block,
    )
    return _with_survivors(found, trace)


def trace_device(trace: MemoryTrace, device: int) -> TraceDevice | None:
    """The trace's description of device ``device``, if it has one."""
    return next((found for found in trace.devices if found.index == device), None)


def _with_survivors(found: Lifetimes, trace: MemoryTrace) -> Lifetimes:
    """Add the blocks that the final segments hold although no event of the trace allocated them."""
    described = trace_device(trace, found.device)
    if described is None or not described.segments:
        return found
    alive = set(found.address[found.freed == found.rows].tolist())
    extra: list[tuple[int, int, int]] = []
    for segment in described.segments:
        cursor = int(segment["address"])
        for block in segment["blocks"]:
            here = int(block.get("address", cursor))
            cursor = here + int(block["size"])
            if block["state"] == "active_allocated" and here not in alive:
                extra.append((here, int(block.get("requested_size", block["size"])), int(block["size"])))
    if not extra:
        return found
    count = len(extra)
    never = np.full(count, found.rows, dtype=np.int64)
    return Lifetimes(
        device=found.device,
        rows=found.rows,
        born=np.concatenate([found.born, np.full(count, -1, dtype=np.int64)]),
        freed=np.concatenate([found.freed, never]),
        completed=np.concatenate([found.completed, never]),
        address=np.concatenate([found.address, np.array([e[0] for e in extra], dtype=np.uint64)]),
        size=np.concatenate([found.size, np.array([e[1] for e in extra], dtype=np.int64)]),
        block=np.concatenate([found.block, np.array([e[2] for e in extra], dtype=np.int64)]),
    )
