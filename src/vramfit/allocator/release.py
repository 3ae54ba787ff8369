"""Getting memory when no cached block fits: from the driver, with cached memory given back to it; else the error."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from vramfit import errors
from vramfit.allocator.block import ADDRESS_BITS, ADDRESS_MASK, Block, Pool, PrivatePool
from vramfit.allocator.core import AllocatorEventKind, PoolId
from vramfit.allocator.expandable import ExpandableStore
from vramfit.units import GIB, KIB, MIB

EXABYTE = 1 << 60
"""Requests from here on fail at once (c10/cuda/CUDACachingAllocator.cpp, ``allocate``)."""


def torch_size(size: int) -> str:
    """Write bytes as torch's messages do (c10/core/CachingDeviceAllocator, ``format_size``): ``1.50 GiB``."""
    if size <= 1024:
        return f"{size} bytes"
    for unit, factor in (("KiB", KIB), ("MiB", MIB)):
        if size <= factor * 1024:
            return f"{size / factor:.2f} {unit}"
    return f"{size / GIB:.2f} GiB"


@dataclass(kw_only=True, eq=False, repr=False)
class OutOfMemory(errors.OutOfMemory):
    """The caching allocator could not serve a request, after every retry.

    Attributes:
        device: index of the card.
        requested_bytes: what the caller asked for.
        rounded_bytes: the request after rounding, as the ``oom`` event of a trace has it.
        segment_bytes: what had to come from the driver; this is what torch's message names.
        total_bytes: memory of the card.
        free_bytes: free memory of the card when the request failed.
        allocated_bytes: bytes in blocks handed out, freed private pool blocks not included.
        reserved_bytes: bytes held from the driver.
        allowed_bytes: the limit by ``set_per_process_memory_fraction``, or None.
        private_pool_bytes: cached bytes of private pools (CUDA graphs), which other requests cannot use.
        process_bytes: memory of this process by NVML (context and allocator), or None when unknown.
        rejected: turned down by ``throw_on_cudamalloc_oom`` before any attempt.
    """

    device: int
    requested_bytes: int
    rounded_bytes: int
    segment_bytes: int
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    allowed_bytes: int | None = None
    private_pool_bytes: int = 0
    process_bytes: int | None = None
    rejected: bool = False

    def __post_init__(self) -> None:
        """Take torch's message for one's own."""
        super().__init__(self.torch_message())

    def torch_message(self) -> str:
        """The text of the ``torch.OutOfMemoryError`` that a card raises for the same figures.

        It is the same in torch 2.11 to 2.14 (c10/cuda/CUDACachingAllocator.cpp,
        ``DeviceCachingAllocator::malloc``, and the strings of libc10_cuda.so).
        """
        if self.requested_bytes >= EXABYTE:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        if self.rejected:
            return (
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                f"per_process_memory_fraction limit. Requested size: {torch_size(self.requested_bytes)}"
            )
        process = allowed = private = ""
        if self.process_bytes is not None:
            use = torch_size(self.process_bytes)
            process = f"Including non-PyTorch memory, this process has {use} memory in use. "
        if self.allowed_bytes is not None:
            allowed = f"{torch_size(self.allowed_bytes)} allowed; "
        if self.private_pool_bytes:
            use = torch_size(self.private_pool_bytes)
            private = f"with {use} allocated in private pools (e.g., CUDA Graphs), "
        allocated = self.allocated_bytes + self.private_pool_bytes
        return (
            f"CUDA out of memory. Tried to allocate {torch_size(self.segment_bytes)}. GPU {self.device} has "
            f"a total capacity of {torch_size(self.total_bytes)} of which {torch_size(self.free_bytes)} is "
            "free. "
            f"{process}{allowed}Of the allocated memory {torch_size(allocated)} is allocated by PyTorch, "
            f"{private}and {torch_size(self.reserved_bytes - allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
            "Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


# -- Obtaining memory ---------------------------------------------------------------------------------------


NO_POOL: PoolId = (0, 0)
"""torch's id for the common pools."""


class ReleasingStore(ExpandableStore):
    """An `ExpandableStore` that knows the order of retries."""

    def _obtain(self, pool: Pool, stream: int, size: int, rounded: int) -> Block:
        """A block for a request that no cached block serves, in torch's order of attempts.

        Garbage collection, the driver, private pools opened for this (``use_on_oom``), oversized cached blocks and
        the driver, all cached blocks and the driver. Source: c10/cuda/CUDACachingAllocator.cpp,
        ``DeviceCachingAllocator::malloc`` of 2.13; the pools came last until
        github.com/pytorch/pytorch/pull/169699 of December 2025.
        """
        if self._collects:
            self._collect_garbage()
        self._reject_early(size, rounded)
        block = self._allocate(pool, stream, rounded)
        if block is None and pool.owner is None:
            block = self._take_from_opened_pools(pool, stream, rounded)
        if block is None and self._release_oversized(pool, stream, rounded):
            block = self._allocate(pool, stream, rounded)
        if block is None and not self._keeps_cache():
            self._release_cached()
            self._stats.num_alloc_retries += 1
            block = self._allocate(pool, stream, rounded)
        if block is None:
            self._emit(AllocatorEventKind.OOM, self.driver.free_bytes, rounded, stream)
            self._stats.num_ooms += 1
            raise self._out_of_memory(size, rounded)
        return block

    def _keeps_cache(self) -> bool:
        """Whether cached memory stays where a request fails: while a graph is captured, and until 2.12 in any pool."""
        return self._capturing > 0 or (bool(self._captures) and not self._rules.pools_release_cache)

    def _allocate(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        """One attempt at the driver (``alloc_block``), within the memory fraction."""
        segment = self._rounding.segment(rounded)
        if self._is_beyond_limit(segment):
            return None
        if self._config.expandable_segments:
            return self._grow(pool, stream, rounded)
        return self._new_segment(pool.shelf(stream), segment)

    def _is_beyond_limit(self, segment: int) -> bool:
        """Whether so many bytes more pass the memory fraction, which a card without a limit does not enforce."""
        return (
            self._limit is not None and self.driver.ceiling is None and self._reserved + segment > self._limit
        )

    def _reject_early(self, size: int, rounded: int) -> None:
        """With ``throw_on_cudamalloc_oom``, a request above the fraction fails without any retry."""
        if not self._config.throw_on_cudamalloc_oom:
            return
        if self._is_beyond_limit(self._rounding.segment(rounded)):
            self._stats.num_oom_rejections += 1
            raise self._out_of_memory(size, rounded, rejected=True)

    def _take_from_opened_pools(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        for pool_id in self._use_on_oom:
            private = self._private[pool_id]
            block = self._take_free(private.small if pool.small else private.large, stream, rounded)
            if block is not None:
                return block
        return None

    def _out_of_memory(self, size: int, rounded: int, *, rejected: bool = False) -> OutOfMemory:
        private = sum(p.small.cached_bytes() + p.large.cached_bytes() for p in self._private.values())
        return OutOfMemory(
            device=self.device,
            requested_bytes=size,
            rounded_bytes=rounded,
            segment_bytes=self._rounding.segment(rounded),
            total_bytes=self.driver.total_bytes,
            free_bytes=self.driver.free_bytes,
            allocated_bytes=self._stats.current("bytes"),
            reserved_bytes=self._stats.current("reserved"),
            allowed_bytes=self._limit,
            private_pool_bytes=private,
            process_bytes=self.driver.process_bytes,
            rejected=rejected,
        )

    def _collect_garbage(self) -> None:
        """Free large cached segments older than the average, until the threshold is met again.

        A block's age is how many searches for large blocks it has lain through. Source:
        ``garbage_collect_cached_blocks``.
        """
        assert self._limit is not None
        pool = self._large
        target = self._reserved - int(self._config.garbage_collection_threshold * self._limit)
        if target <= 0:
            return
        candidates = [block for block in self._free_blocks(pool) if self._is_whole(block)]
        age = sum(pool.searches - block.age_base for block in candidates)
        reclaimed, freed = 0, True
        while reclaimed < target and freed and candidates:
            threshold, freed = age / len(candidates), False
            for block in tuple(candidates):
                if pool.searches - block.age_base >= threshold:
                    freed = True
                    reclaimed += block.size
                    age -= pool.searches - block.age_base
                    candidates.remove(block)
                    self._release_segment(block)

    def _free_blocks(self, pool: Pool) -> list[Block]:
        return [self._blocks[address] for address in pool.free_addresses()]

    @staticmethod
    def _is_whole(block: Block) -> bool:
        return block.segment is None and not block.is_split

    def _release_oversized(self, pool: Pool, stream: int, rounded: int) -> bool:
        """Free oversized cached blocks, enough for the request (``release_available_cached_blocks``)."""
        limit = self._max_split
        if limit is None:
            return False
        keys = pool.shelf(stream).keys
        wanted = max(rounded, limit)
        index = bisect_left(keys, wanted << ADDRESS_BITS)
        if index < len(keys):
            block = self._blocks[keys[index] & ADDRESS_MASK]
            if self._is_whole(block):
                self._release_segment(block)
            return True
        released = 0
        for key in reversed(tuple(keys)):  # no single block is large enough: the largest first
            if released >= wanted or key >> ADDRESS_BITS < limit:
                break
            block = self._blocks[key & ADDRESS_MASK]
            if self._is_whole(block):
                released += block.size
                self._release_segment(block)
        return released >= wanted

    def _release_cached(self, pool_id: PoolId = NO_POOL) -> None:
        """Return all cached memory that is whole (``release_cached_blocks``).

        Private pools are touched only when nothing holds them any more.

        Args:
            pool_id: only this private pool's memory; (0, 0) for everything.
        """
        everything = pool_id == NO_POOL
        if everything:
            if not self._captures:
                self._synchronize(None)
            self._release_pool_blocks(self._large)
            self._release_pool_blocks(self._small)
        for found, private in tuple(self._private.items()):
            if private.users or not (everything or found == pool_id):
                continue
            if not everything:
                self._synchronize(private)
            self._release_pool_blocks(private.small)
            self._release_pool_blocks(private.large)
            if private.reserved == 0:
                self._drop_reservations(private)
                del self._private[found]

    def _drop_reservations(self, private: PrivatePool) -> None:
        """Give back addresses that never got memory, of a pool that goes away."""
        for pool in (private.small, private.large):
            for shelf in pool.shelves.values():
                for address in tuple(shelf.unmapped):
                    block = self._blocks[address]
                    assert block.segment is not None
                    self._drop_segment(block, block.segment)

    def _release_pool_blocks(self, pool: Pool) -> None:
        blocks = self._free_blocks(pool)
        for block in blocks:
            if self._is_whole(block):
                self._release_segment(block)
        for block in blocks:
            if block.segment is not None:
                self._unmap(block)

    def _synchronize(self, private: PrivatePool | None) -> None:
        """Wait for all streams, so that every pending block is free (``synchronize_and_free_events``)."""
        self._stats.num_sync_all_streams += 1
        self._insert_deferred_events()
        for queue in tuple(self._events.values()):
            for block in tuple(queue):
                if private is None or block.shelf.pool.owner is private:
                    queue.remove(block)
                    self._event_done(block)
        self._events = {stream: queue for stream, queue in self._events.items() if queue}

    def _event_done(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._complete(block)

    def _insert_deferred_events(self) -> None:
        """Record the events of blocks freed during a capture; streams of the capture itself need none."""
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            captured = self._capture_uses.pop(block.address, set())
            block.uses = {stream: None for stream in block.uses or {} if stream not in captured}
            self._insert_events(block)
            if block.events == 0:
                self._complete(block)

    def _process_events(self, done: Callable[[int, int], bool]) -> None:
        """Free the pending blocks whose streams are done with them, in each stream's order."""
        self._insert_deferred_events()
        for stream in tuple(self._events):
            queue = self._events[stream]
            while queue and done(stream, queue[0].address):
                self._event_done(queue.popleft())
            if not queue:
                del self._events[stream]
