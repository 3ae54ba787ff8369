"""Takes an allocator over from a snapshot: the same segments, the same blocks in them, the same counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from vramfit.allocator.block import ALLOCATED, UNMAPPED, Block, ExpandableSegment, Pool, Shelf
from vramfit.allocator.caching import CachingAllocator
from vramfit.allocator.core import SMALL_SEGMENT

# Pending blocks wait for a stream; a snapshot does not say for which.
_UNKNOWN_STREAM = -1


def restore(
    allocator: CachingAllocator,
    segments: Sequence[Mapping[str, Any]],
    lowest_addresses: Mapping[tuple[int, bool], int] | None = None,
) -> None:
    """Put a fresh allocator into the state that ``segments`` describe.

    Peaks and accumulated figures begin with that state. The driver is not asked for the memory: it has to be
    one that knows these addresses, or does not care. The reservations behind expandable segments, which
    snapshots do not show, are taken to be one for each pool and stream, beginning at the lowest address
    known.

    Args:
        allocator: an unused one.
        segments: as `CachingAllocator.segments` and ``torch.cuda.memory._snapshot()["segments"]`` give them;
            blocks that wait for another stream can be finished with `CachingAllocator.complete_free`.
        lowest_addresses: for (stream, small pool): an address that its expandable segment is known to hold,
            where it is lower than what is mapped.

    Raises:
        ValueError: the allocator has been used.
    """
    if allocator._blocks:
        raise ValueError("only an allocator that was not used yet can be restored")
    pending: list[int] = []
    reserved: dict[Shelf, list[Mapping[str, Any]]] = {}
    for segment in sorted(segments, key=lambda segment: int(segment["address"])):
        shelf = _pool(allocator, segment).shelf(segment["stream"])
        if segment["is_expandable"]:
            reserved.setdefault(shelf, []).append(segment)
        else:
            chain = _blocks(allocator, segment, shelf, None, pending)
            _link(allocator, chain)
            _count_segment(allocator, shelf, segment["total_size"], chain)
    for shelf, mapped in reserved.items():
        known = (lowest_addresses or {}).get((shelf.stream, shelf.pool.small), mapped[0]["address"])
        _restore_expandable(allocator, shelf, mapped, min(known, mapped[0]["address"]), pending)
    for address in pending:
        allocator.record_stream(address, _UNKNOWN_STREAM)
        allocator.free(address)
    allocator.refresh_plain()
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()


def _pool(allocator: CachingAllocator, segment: Mapping[str, Any]) -> Pool:
    small = segment["segment_type"] == "small"
    pool_id = tuple(segment["segment_pool_id"])
    if pool_id == (0, 0):
        return allocator._small if small else allocator._large
    if pool_id not in allocator._private:
        allocator.create_pool(pool_id)
    private = allocator._private[pool_id]
    return private.small if small else private.large


def _blocks(
    allocator: CachingAllocator,
    segment: Mapping[str, Any],
    shelf: Shelf,
    expandable: ExpandableSegment | None,
    pending: list[int],
) -> list[Block]:
    """The blocks of one segment, not linked yet."""
    chain = []
    for entry in segment["blocks"]:
        block = Block(entry["address"], entry["size"], shelf, expandable)
        block.requested = entry["requested_size"]
        if entry["state"] == "inactive":
            shelf.add(block)
        else:
            block.state = ALLOCATED
            shelf.stats.hand_out(block.size, block.requested)
            if allocator._max_split is not None and block.size >= allocator._max_split:
                allocator._stats.oversize_allocations.add(1)
            if entry["state"] != "active_allocated":
                pending.append(block.address)
        chain.append(block)
    return chain


def _link(allocator: CachingAllocator, chain: list[Block]) -> None:
    for before, after in pairwise(chain):
        before.next, after.prev = after, before
    for block in chain:
        allocator._blocks[block.address] = block


def _count_segment(allocator: CachingAllocator, shelf: Shelf, size: int, chain: list[Block]) -> None:
    stats = shelf.stats
    allocator._count_reserved(shelf, size)
    stats.segments_in += 1
    allocator._stats.note_peak(stats, "segments")
    if allocator._max_split is not None and size >= allocator._max_split:
        allocator._stats.oversize_segments.add(1)
    for block in chain:
        if block.state != ALLOCATED and block.is_split:
            stats.add_split(block.size)
            stats.add_split_block()


def _restore_expandable(
    allocator: CachingAllocator,
    shelf: Shelf,
    mapped: list[Mapping[str, Any]],
    begin: int,
    pending: list[int],
) -> None:
    """One reservation with its mapped ranges and, between and behind them, ranges without memory."""
    page = SMALL_SEGMENT if shelf.pool.small else allocator.config.large_segment_size
    total = allocator.driver.total_bytes
    last = mapped[-1]["address"] + mapped[-1]["total_size"]
    # As `ExpandableStore._reserve_segment` takes it, and no less than what is in it.
    size = max(-(-(total + total // 8) // page) * page, last - begin)
    expandable = ExpandableSegment(address=begin, size=size, page=page)
    allocator._expandable.append(expandable)
    chain: list[Block] = []
    cursor = begin

    def leave_out(until: int) -> None:
        if until > cursor:
            gap = Block(cursor, until - cursor, shelf, expandable)
            gap.state = UNMAPPED
            shelf.add_unmapped(gap)
            chain.append(gap)

    for segment in mapped:
        leave_out(segment["address"])
        chain += _blocks(allocator, segment, shelf, expandable, pending)
        cursor = segment["address"] + segment["total_size"]
        allocator._count_reserved(shelf, segment["total_size"])
    leave_out(begin + size)
    _link(allocator, chain)
