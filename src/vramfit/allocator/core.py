"""The allocator's state, and the moves that every rule consists of: take, split, merge, hand out, give back.

NOTE [Two paths]. `CachingAllocator.malloc` and `CachingAllocator.free` carry the common case inline: classic
segments, no size limits, one stream, no observer of single events. Everything else goes through the methods of
this module, which say the same rules once more in full. `BlockStore.plain` tells which path is right; whatever
changes an input of it calls `BlockStore.refresh_plain`. The tests run both paths side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from vramfit.allocator.block import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    ALLOCATED,
    FREE,
    PENDING,
    UNMAPPED,
    Block,
    ExpandableSegment,
    Pool,
    PrivatePool,
    Shelf,
)
from vramfit.allocator.config import ROUNDUP_INTERVALS, AllocatorConfig
from vramfit.allocator.driver import Driver
from vramfit.allocator.stats import DeviceStats
from vramfit.allocator.versions import REFERENCE_VERSION, TorchVersion, rules_for
from vramfit.units import MIB

# -- How large a block and a segment a request takes ---------------------------------------------------------


MIN_BLOCK = 512
"""Blocks are multiples of this (c10/core/AllocatorConfig.h, ``kMinBlockSize``)."""

SMALL_REQUEST = 1 * MIB
"""Largest rounded request of the small pool (``kSmallSize``)."""

SMALL_SEGMENT = 2 * MIB
"""Segment, and page of expandable segments, of the small pool (``kSmallBuffer``)."""

MIN_LARGE_REQUEST = 10 * MIB
"""Requests from here on get a segment of their own size (``kMinLargeAlloc``)."""

LARGE_ROUNDING = 2 * MIB
"""... rounded up to this (``kRoundLarge``)."""


class Rounding:
    """The two roundings under one configuration.

    Attributes:
        plain: no power-of-two divisions are set, so blocks are multiples of 512 bytes.
    """

    __slots__ = ("_divisions", "_large_segment", "plain")

    def __init__(self, config: AllocatorConfig) -> None:
        self._divisions = config.roundup_power2_divisions
        self._large_segment = config.large_segment_size
        self.plain = max(self._divisions) <= 1

    def block(self, size: int) -> int:
        """Bytes of the block for a request (c10/cuda/CUDACachingAllocator.cpp, ``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if not self.plain:
            # The interval of 1 MiB also serves everything below it, the last one everything above.
            interval = min(max(size.bit_length() - 21, 0), ROUNDUP_INTERVALS - 1)
            divisions = self._divisions[interval]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                return _next_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment(self, rounded: int) -> int:
        """Bytes to ask the driver for when no cached block serves (``get_allocation_size``)."""
        if rounded <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE_REQUEST:
            return self._large_segment
        return -(-rounded // LARGE_ROUNDING) * LARGE_ROUNDING


def _next_division(size: int, divisions: int) -> int:
    """The next of the equal steps between two powers of two (``roundup_power2_next_division``)."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size // step) * step


# -- Events for an observer, as in a torch memory trace --------------------------------------------------------


class AllocatorEventKind(IntEnum):
    """The actions of a torch memory trace (c10/core/CachingDeviceAllocator.h, ``TraceEntry::Action``).

    The meaning of an event's address and size follows torch: `ALLOC` and both frees carry the *requested*
    size, segment events the bytes of the segment or mapping, `OOM` the free bytes of the device as address
    and the rounded request as size, `SNAPSHOT` the active bytes as size.
    """

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8

    @property
    def torch_name(self) -> str:
        """The action as torch spells it in a snapshot, for instance ``free_requested``."""
        return self.name.lower()


EventCallback = Callable[[AllocatorEventKind, int, int, int], None]
"""Called as ``(kind, address, size, stream)`` after each event."""

FreedCallback = Callable[[int, int, int], None]
"""Called as ``(address, requested size, stream)`` when a block is given back and free at once."""


PoolId = tuple[int, int]

_ALLOC = AllocatorEventKind.ALLOC
_FREE_REQUESTED = AllocatorEventKind.FREE_REQUESTED
_FREE_COMPLETED = AllocatorEventKind.FREE_COMPLETED


class StreamEvents(Protocol):
    """The events for which freed blocks wait, one on each other stream that used a block."""

    def record(self, stream: int, address: int) -> None:
        """Record an event on a stream, for the block at an address."""

    def passed(self, stream: int, address: int) -> bool:
        """Whether the stream has reached that event."""


class BlockStore:
    """Blocks, pools and counters of one device; the base of `CachingAllocator`.

    Attributes:
        torch_version: whose rules apply.
        plain: whether the short paths are right (NOTE [Two paths]).
    """

    def __init__(
        self,
        driver: Driver,
        *,
        config: AllocatorConfig | None = None,
        torch_version: TorchVersion = REFERENCE_VERSION,
        device: int = 0,
        on_event: EventCallback | None = None,
        on_segment: EventCallback | None = None,
        on_freed: FreedCallback | None = None,
        stream_events: StreamEvents | None = None,
    ) -> None:
        self.driver = driver
        self.device = device
        self.torch_version = torch_version
        self.plain = False
        self._collects = False
        self._rules = rules_for(torch_version)
        self._on_event = on_event
        self._on_segment = on_event if on_segment is None else on_segment
        self._on_freed = on_freed
        self._stream_events = stream_events
        self._stats = DeviceStats()
        self._small = Pool(small=True, stats=self._stats.small)
        self._large = Pool(small=False, stats=self._stats.large)
        self._small_shelves = self._small.shelves
        self._large_shelves = self._large.shelves
        self._blocks: dict[int, Block] = {}  # every block by its address: free, handed out and unmapped
        self._spare: list[Block] = []  # merged away, to be used again
        self._reserved = 0
        self._limit: int | None = None  # bytes that may be reserved
        self._fraction = 1.0
        self._expandable: list[ExpandableSegment] = []
        self._events: dict[int, deque[Block]] = {}  # by stream: blocks it may still use
        self._pending: dict[int, Block] = {}  # freed blocks that are not free yet, by address
        self._deferred: list[Block] = []  # pending blocks freed during a capture: their events come later
        self._capture_uses: dict[int, set[int]] = {}  # streams that used a block during a capture, by address
        self._captures: list[tuple[PoolId, frozenset[int] | None]] = []  # pools that requests go to
        self._capturing = 0  # graphs that are captured
        self._private: dict[PoolId, PrivatePool] = {}
        self._use_on_oom: list[PoolId] = []
        self._set_config(AllocatorConfig() if config is None else config)
        limit = self._config.max_split_size
        self._reported_max_split = -1 if limit is None else limit  # torch reads it once, at the start

    def _set_config(self, config: AllocatorConfig) -> None:
        self._config = config
        self._rounding = Rounding(config)
        self._expands = config.expandable_segments
        self._max_split = config.max_split_size
        if config.per_process_memory_fraction != self._fraction:
            self._fraction = config.per_process_memory_fraction
            self._limit = int(self._fraction * self.driver.total_bytes)
        self.refresh_plain()

    def _new_private_pool(self, pool_id: PoolId, *, no_split: bool) -> None:
        stats = self._stats
        self._private[pool_id] = PrivatePool(pool_id, small=stats.small, large=stats.large, no_split=no_split)

    def refresh_plain(self) -> None:
        """Decide again which path is right, and whether garbage collection is on: with a threshold and a limit."""
        self._collects = self._limit is not None and self._config.garbage_collection_threshold > 0
        self.plain = (
            self._rounding.plain
            and self._max_split is None
            and not self._expands
            and not self._expandable
            and not self._pending
            and not self._captures
            and not self._collects
            and not self._small.searches
            and not self._large.searches
            and (self._on_event is None or self._on_freed is not None)
        )

    def _emit(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        if self._on_segment is not None:
            self._on_segment(kind, address, size, stream)

    # Taking a free block

    def _pool_for(self, rounded: int, stream: int) -> Pool:
        """The pool that serves a request (``get_pool``): of the capture that claims the stream, if any."""
        if self._captures:
            for pool_id, streams in self._captures:
                if streams is None or stream in streams:
                    private = self._private[pool_id]
                    return private.small if rounded <= SMALL_REQUEST else private.large
        return self._small if rounded <= SMALL_REQUEST else self._large

    def _take_free(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        """Take the best fitting free block (``get_free_block``): the smallest, lowest address first."""
        if self._collects:
            pool.searches += 1
        keys = pool.shelf(stream).keys
        index = self._first_fit(keys, rounded)
        if index is None:
            return None
        limit = self._max_split
        if limit is not None:
            size = keys[index] >> ADDRESS_BITS
            if rounded < limit <= size:
                return None
            if rounded >= limit and size >= rounded + self._config.max_non_split_rounding:
                return None
        return self._blocks[keys.pop(index) & ADDRESS_MASK]

    def _first_fit(self, keys: list[int], rounded: int) -> int | None:
        blocks = self._blocks
        index = bisect_left(keys, rounded << ADDRESS_BITS)
        count = len(keys)
        if index == count:
            return None
        block = blocks[keys[index] & ADDRESS_MASK]
        if block.segment is None:
            return index
        if self._expands:
            # A block that can grow counts with the size it can grow to, so that the end of the segment
            # is kept for requests that fit nowhere else.
            while block.segment is not None and index + 1 < count:
                following = blocks[keys[index + 1] & ADDRESS_MASK]
                if _grown_size(following) >= _grown_size(block):
                    break
                index, block = index + 1, following
            return index
        # Expandable segments were turned off at run time: their blocks must not be given out.
        index += 1
        while index < count and blocks[keys[index] & ADDRESS_MASK].segment is not None:
            index += 1
        return index if index < count else None

    # Handing out

    def _should_split(self, block: Block, rounded: int) -> bool:
        pool = block.shelf.pool
        if pool.owner is not None and pool.owner.no_split:
            return False
        rest = block.size - rounded
        if pool.small or self._expands:
            return rest >= MIN_BLOCK
        return rest > SMALL_REQUEST and (self._max_split is None or rounded < self._max_split)

    def _hand_out(self, block: Block, rounded: int, size: int) -> int:
        """Give a block to the caller, split where the rules say so (``alloc_found_block``)."""
        stats = block.shelf.stats
        was_split = block.prev is not None or block.next is not None
        if self._should_split(block, rounded):
            rest = self._split(block, rounded)
            if block.segment is None:
                if was_split:
                    stats.split_bytes_out += rounded
                else:
                    stats.add_split(rest.size)
                    stats.add_split_block()
        elif was_split and block.segment is None:
            stats.split_bytes_out += block.size
            stats.split_count_out += 1
        block.state = ALLOCATED
        block.requested = size
        stats.hand_out(block.size, size)
        if self._pending:
            stats.note_active()
        if self._max_split is not None and block.size >= self._max_split:
            self._stats.oversize_allocations.add(1)
        if self._on_event is not None:
            self._on_event(_ALLOC, block.address, size, block.shelf.stream)
        return block.address

    def _split(self, block: Block, rounded: int) -> Block:
        """Cut a block at ``rounded`` bytes and put the rest among the free; the rest is returned."""
        rest = Block(block.address + rounded, block.size - rounded, block.shelf, block.segment)
        rest.requested = block.requested
        block.size = rounded
        block.key = rounded << ADDRESS_BITS | block.address
        self._link(block, rest)
        block.shelf.add(rest)
        return rest

    def _link(self, block: Block, after: Block) -> None:
        """Put a new block right after another one in its segment."""
        after.prev, after.next = block, block.next
        if block.next is not None:
            block.next.prev = after
        block.next = after
        self._blocks[after.address] = after

    # Giving back

    def _give_back(self, block: Block) -> None:
        """Take a block back from the caller (``free``): free at once unless other streams used it."""
        stats = block.shelf.stats
        stats.count_out += 1
        stats.bytes_out += block.size
        if self._on_event is not None:
            self._on_event(_FREE_REQUESTED, block.address, block.requested, block.shelf.stream)
        if self._max_split is not None and block.size >= self._max_split:
            self._stats.oversize_allocations.take(1)
        if block.uses is None:
            self._finish_free(block)
            return
        self._start_pending(block)
        if self._captures:
            # An event of a capture cannot be asked, so torch records the events when no capture runs.
            self._deferred.append(block)
        else:
            self._capture_uses.pop(block.address, None)
            self._insert_events(block)
        self.refresh_plain()

    def _start_pending(self, block: Block) -> None:
        stats = block.shelf.stats
        block.state = PENDING
        stats.pending_count += 1
        stats.pending_bytes += block.size
        self._pending[block.address] = block
        stats.note_active()

    def _insert_events(self, block: Block) -> None:
        """Record an event on each stream that used a block."""
        streams = block.uses or {}
        block.uses = None
        for stream in streams:
            block.events += 1
            self._events.setdefault(stream, deque()).append(block)
            if self._stream_events is not None:
                self._stream_events.record(stream, block.address)

    def _complete(self, block: Block) -> None:
        """Free a pending block that no stream uses any more."""
        stats = block.shelf.stats
        stats.pending_count -= 1
        stats.pending_bytes -= block.size
        del self._pending[block.address]
        self._finish_free(block)
        self.refresh_plain()

    def _finish_free(self, block: Block) -> None:
        """Put a block among the free ones, merged with free neighbours (``free_block``)."""
        shelf = block.shelf
        stats = shelf.stats
        if self._on_event is not None:
            self._on_event(_FREE_COMPLETED, block.address, block.requested, shelf.stream)
        stats.requested_out += block.requested
        block.state = FREE
        merged, gone = 0, 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                gone += self._merge(block, neighbour)
                merged += 1
        shelf.add(block)
        if block.segment is not None:
            return  # pages of expandable segments can be released, split or not
        if block.prev is None and block.next is None:
            stats.split_bytes_out += gone
            stats.split_count_out += merged
            return
        stats.add_split(block.size - gone)
        if merged == 0:
            stats.add_split_block()
        elif merged == 2:
            stats.split_count_out += 1

    def _merge(self, block: Block, neighbour: Block | None) -> int:
        """Join a free or unmapped neighbour to a block of the same kind; the bytes that it brought."""
        if neighbour is None or neighbour.state != block.state:
            return 0
        if neighbour.state == FREE:
            neighbour.shelf.remove(neighbour)
        else:
            neighbour.shelf.remove_unmapped(neighbour)
        del self._blocks[neighbour.address]
        if block.prev is neighbour:
            del self._blocks[block.address]
            block.address = neighbour.address
            self._blocks[block.address] = block
            block.prev = neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        block.size += neighbour.size
        return neighbour.size

    # Memory from and to the driver

    def _count_reserved(self, shelf: Shelf, size: int) -> None:
        self._reserved += size
        shelf.stats.reserved_in += size
        self._stats.note_peak(shelf.stats, "reserved")
        self._stats.num_device_alloc += 1
        owner = shelf.pool.owner
        if owner is not None:
            owner.reserved += size
            for gauge in self._stats.gauges_of(owner.pool_id, small=shelf.pool.small):
                gauge.add(size)

    def _count_released(self, shelf: Shelf, size: int) -> None:
        self._reserved -= size
        shelf.stats.reserved_out += size
        self._stats.num_device_free += 1
        owner = shelf.pool.owner
        if owner is not None:
            owner.reserved -= size
            for gauge in self._stats.gauges_of(owner.pool_id, small=shelf.pool.small):
                gauge.take(size)

    def _new_segment(self, shelf: Shelf, size: int) -> Block | None:
        """A block from ``cudaMalloc``, or None when the driver has no memory left."""
        address = self.driver.malloc(size)
        if address is None:
            return None
        block = Block(address, size, shelf)
        self._blocks[address] = block
        self._count_reserved(shelf, size)
        self._count_segment(shelf, size)
        self._emit(AllocatorEventKind.SEGMENT_ALLOC, address, size, shelf.stream)
        return block

    def _count_segment(self, shelf: Shelf, size: int) -> None:
        shelf.stats.segments_in += 1
        self._stats.note_peak(shelf.stats, "segments")
        if self._max_split is not None and size >= self._max_split:
            self._stats.oversize_segments.add(1)

    def _release_segment(self, block: Block) -> None:
        """Return a segment that is one free block to the driver (``release_block``)."""
        shelf = block.shelf
        self._emit(AllocatorEventKind.SEGMENT_FREE, block.address, block.size, shelf.stream)
        self.driver.free(block.address, block.size)
        self._count_released(shelf, block.size)
        shelf.stats.segments_out += 1
        if self._max_split is not None and block.size >= self._max_split:
            self._stats.oversize_segments.take(1)
        shelf.remove(block)
        del self._blocks[block.address]


def _grown_size(block: Block) -> int:
    """The size a block can grow to when the range after it is mapped."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
