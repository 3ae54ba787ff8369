"""Expandable segments: ranges of addresses that pages are mapped into and unmapped from."""

from __future__ import annotations

from vramfit.allocator.block import FREE, UNMAPPED, Block, ExpandableSegment, Pool, Shelf
from vramfit.allocator.core import SMALL_SEGMENT, AllocatorEventKind, BlockStore


class ExpandableStore(BlockStore):
    """A `BlockStore` that can grow segments in place."""

    def _grow(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        """A free block of at least ``rounded`` bytes by mapping pages, or None when memory runs out.

        Pages mapped before memory ran out stay, as free memory. Source:
        c10/cuda/CUDACachingAllocator.cpp, ``try_allocate_expandable_block``.
        """
        shelf = pool.shelf(stream)
        block = self._lowest_room(shelf, rounded)
        if block is None:
            block = self._reserve_segment(shelf)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, rounded))
            if mapped is None:
                return None
            block = mapped
        while block.size < rounded:
            after = block.next
            assert after is not None  # _lowest_room saw enough unmapped room behind the block
            mapped = self._map(after, min(rounded - block.size, after.size))
            if mapped is None:
                return None
            block = mapped
        shelf.remove(block)
        return block

    def _lowest_room(self, shelf: Shelf, rounded: int) -> Block | None:
        """The lowest unmapped range, or free block right before one, with enough room after it."""
        for address in shelf.unmapped:
            block = self._blocks[address]
            if block.prev is not None and block.prev.state == FREE:
                block = block.prev
            room, step = 0, block
            while room < rounded and step.state in (FREE, UNMAPPED):
                room += step.size
                if step.next is None:
                    break
                step = step.next
            if room >= rounded:
                return block
        return None

    def _reserve_segment(self, shelf: Shelf) -> Block:
        """Reserve addresses for 9/8 of the card, so that what is unmapped low can be mapped again high."""
        page = SMALL_SEGMENT if shelf.pool.small else self._config.large_segment_size
        total = self.driver.most_bytes
        size = -(-(total + total // 8) // page) * page
        segment = ExpandableSegment(address=self.driver.reserve(size), size=size, page=page)
        self._expandable.append(segment)
        self.refresh_plain()
        block = Block(segment.address, size, shelf, segment)
        block.state = UNMAPPED
        self._blocks[block.address] = block
        shelf.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the pages for ``size`` bytes at the start of an unmapped range (``map_block``).

        Returns the free block they end up in, merged with its neighbours; None when memory runs out.
        """
        segment, shelf = block.segment, block.shelf
        assert segment is not None
        size = -(-size // segment.page) * segment.page
        address = block.address
        if not self.driver.map(address, size):
            return None
        shelf.remove_unmapped(block)
        if size < block.size:
            rest = Block(address + size, block.size - size, shelf, segment)
            rest.state = UNMAPPED
            block.size = size
            self._link(block, rest)
            shelf.add_unmapped(rest)
        block.state = FREE
        self._merge(block, block.prev)
        self._merge(block, block.next)
        shelf.add(block)
        self._count_reserved(shelf, size)
        self._emit(AllocatorEventKind.SEGMENT_MAP, address, size, shelf.stream)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages strictly inside a free block (``unmap_block``)."""
        segment, shelf = block.segment, block.shelf
        assert segment is not None
        page = segment.page
        begin = segment.address - (segment.address - block.address) // page * page
        end = segment.address + (block.address + block.size - segment.address) // page * page
        if begin >= end:
            return
        shelf.remove(block)
        before, after = begin - block.address, block.address + block.size - end
        if before:
            head = Block(block.address, before, shelf, segment)
            self._insert_before(head, block, begin)
            shelf.add(head)
        block.size = end - begin
        if after:
            tail = Block(end, after, shelf, segment)
            self._link(block, tail)
            shelf.add(tail)
        block.state = UNMAPPED
        self._merge(block, block.prev)
        self._merge(block, block.next)
        shelf.add_unmapped(block)
        self.driver.unmap(begin, end - begin)
        self._count_released(shelf, end - begin)
        self._emit(AllocatorEventKind.SEGMENT_UNMAP, begin, end - begin, shelf.stream)
        if not block.is_split:
            self._drop_segment(block, segment)

    def _insert_before(self, head: Block, block: Block, begin: int) -> None:
        """Put ``head`` where ``block`` starts, and ``block`` at ``begin``."""
        head.prev, head.next = block.prev, block
        if block.prev is not None:
            block.prev.next = head
        block.prev = head
        self._blocks[head.address] = head
        block.address = begin
        self._blocks[begin] = block

    def _drop_segment(self, block: Block, segment: ExpandableSegment) -> None:
        """Give the addresses of a wholly unmapped segment back."""
        block.shelf.remove_unmapped(block)
        del self._blocks[block.address]
        self._expandable.remove(segment)
        self.driver.release(segment.address, segment.size)
        self.refresh_plain()
