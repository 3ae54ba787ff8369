"""Blocks and the lists of free ones: what the allocator's rules are about, and how torch's snapshots show them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vramfit.allocator.stats import PoolStats

FREE, ALLOCATED, PENDING, UNMAPPED = range(4)
"""States of a block. PENDING: freed, but another stream may still use it. UNMAPPED: addresses only."""

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class Block:
    """A range of addresses in one segment (c10/cuda/CUDACachingAllocator.cpp, ``struct Block``).

    Attributes:
        address: first byte.
        size: bytes, a multiple of 512.
        requested: bytes the last caller asked for (stale once the block is free, as in torch).
        state: FREE, ALLOCATED, PENDING or UNMAPPED.
        shelf: the free list of its pool and stream.
        prev: the block before it in the segment, or None.
        next: the block after it, or None.
        uses: other streams that used it (``record_stream``); None while there are none.
        events: events that are outstanding before a pending block is free.
        segment: its expandable segment, or None for memory of ``cudaMalloc``.
        key: its place on the shelf, ``size << 48 | address``; right also while the block is not free.
        age_base: the pool's count of searches when the block became free, for garbage collection.
    """

    __slots__ = (
        "address",
        "age_base",
        "events",
        "key",
        "next",
        "prev",
        "requested",
        "segment",
        "shelf",
        "size",
        "state",
        "uses",
    )

    def __init__(
        self, address: int, size: int, shelf: Shelf, segment: ExpandableSegment | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.state = FREE
        self.shelf = shelf
        self.prev: Block | None = None
        self.next: Block | None = None
        self.uses: dict[int, None] | None = None
        self.events = 0
        self.segment = segment
        self.key = size << ADDRESS_BITS | address
        self.age_base = 0

    @property
    def is_split(self) -> bool:
        """Whether the segment holds other blocks too."""
        return self.prev is not None or self.next is not None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpandableSegment:
    """A reserved range of addresses that pages are mapped into.

    Attributes:
        address: first byte, a multiple of the page size apart from the others.
        size: bytes of the reservation.
        page: bytes of a page: 2 MiB in the small pool, ``large_segment_size`` in the large one.
    """

    address: int
    size: int
    page: int


class Shelf:
    """The free blocks of one pool and stream, smallest first and lowest address first among equals.

    A block's place is the integer ``size << 48 | address``: comparing such keys is what bisect does fastest.
    """

    __slots__ = ("keys", "pool", "stats", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.stats = pool.stats
        self.keys: list[int] = []
        self.unmapped: list[int] = []  # addresses of unmapped ranges, lowest first

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.age_base = self.pool.searches
        block.key = key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)

    def remove(self, block: Block) -> None:
        """Take a block from the free ones."""
        del self.keys[bisect_left(self.keys, block.key)]

    def add_unmapped(self, block: Block) -> None:
        """Put a block among the ranges without memory."""
        insort(self.unmapped, block.address)

    def remove_unmapped(self, block: Block) -> None:
        """Take a block from the ranges without memory."""
        del self.unmapped[bisect_left(self.unmapped, block.address)]


class Pool:
    """A small or large pool (``struct BlockPool``): one shelf a stream.

    Attributes:
        small: holds blocks of at most 1 MiB.
        stats: the counters of its kind, which private pools share with the common ones.
        owner: the private pool it belongs to, or None.
        searches: how often a free block was looked for while garbage collection was on.
    """

    __slots__ = ("owner", "searches", "shelves", "small", "stats")

    def __init__(self, *, small: bool, stats: PoolStats, owner: PrivatePool | None = None) -> None:
        self.small = small
        self.stats = stats
        self.owner = owner
        self.searches = 0
        self.shelves: dict[int, Shelf] = {}

    def shelf(self, stream: int) -> Shelf:
        """The shelf of a stream, made at its first use."""
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        return found

    def free_addresses(self) -> Iterator[int]:
        """Addresses of all free blocks in torch's order: by stream, then size, then address."""
        for stream in sorted(self.shelves):
            for key in tuple(self.shelves[stream].keys):
                yield key & ADDRESS_MASK

    def cached_bytes(self) -> int:
        """Bytes in free blocks."""
        return sum(key >> ADDRESS_BITS for shelf in self.shelves.values() for key in shelf.keys)


class PrivatePool:
    """Memory kept apart for a CUDA graph or a ``torch.cuda.MemPool`` (``struct PrivatePool``).

    Attributes:
        pool_id: torch's pair of numbers.
        users: graphs and contexts that hold it; at 0 its free memory may go back to the driver.
        no_split: blocks are handed out whole.
        reserved: bytes it holds from the driver by pool, small first.
    """

    __slots__ = ("large", "no_split", "pool_id", "reserved", "small", "users")

    def __init__(
        self, pool_id: tuple[int, int], *, small: PoolStats, large: PoolStats, no_split: bool
    ) -> None:
        self.pool_id = pool_id
        self.users = 1
        self.no_split = no_split
        self.small = Pool(small=True, stats=small, owner=self)
        self.large = Pool(small=False, stats=large, owner=self)
        self.reserved = 0


# -- Blocks as torch's snapshots show them ------------------------------------------------------------------


Segment = dict[str, Any]
"""One entry of ``torch.cuda.memory._snapshot()["segments"]``."""

_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


def describe_segments(blocks: Iterable[Block], device: int) -> list[Segment]:
    """All segments by address, in the layout of torch/csrc/cuda/Module.cpp (``segmentInfoToDict``).

    An expandable segment gives one entry for each range of mapped pages.
    """
    heads = [
        block
        for block in blocks
        if block.state != UNMAPPED and (block.prev is None or block.prev.state == UNMAPPED)
    ]
    return [_describe(head, device) for head in sorted(heads, key=lambda block: block.address)]


def _describe(head: Block, device: int) -> Segment:
    blocks: list[dict[str, Any]] = []
    total = allocated = active = requested = 0
    step: Block | None = head
    while step is not None and step.state != UNMAPPED:
        in_use = step.state == ALLOCATED
        total += step.size
        allocated += step.size if in_use else 0
        if in_use or step.state == PENDING:
            active += step.size
            requested += step.requested
        blocks.append(
            {
                "address": step.address,
                "size": step.size,
                "requested_size": step.requested,
                "state": _STATES[step.state],
                "frames": [],
            }
        )
        step = step.next
    pool = head.shelf.pool
    return {
        "device": device,
        "address": head.address,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": active,
        "requested_size": requested,
        "stream": head.shelf.stream,
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": (0, 0) if pool.owner is None else pool.owner.pool_id,
        "is_expandable": head.segment is not None,
        "frames": [],
        "blocks": blocks,
    }
