"""The CUDA caching allocator: malloc, free, empty_cache -> addresses, segments, OutOfMemory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from vramfit.allocator.block import ALLOCATED, Block, Segment, describe_segments
from vramfit.allocator.config import AllocatorConfig
from vramfit.allocator.core import AllocatorEventKind, PoolId
from vramfit.allocator.release import EXABYTE, NO_POOL, ReleasingStore
from vramfit.allocator.stats import NestedStats, flatten


class CachingAllocator(ReleasingStore):
    """What ``c10::cuda::CUDACachingAllocator`` does on one device, to the byte and the address.

    Args:
        driver: the card that memory comes from.
        config: settings; the defaults of torch when None.
        torch_version: major and minor version whose rules apply.
        device: index of the card, for errors and snapshots.
        on_event: called with each event of a torch memory trace, as (kind, address, size, stream).
        on_segment: called instead with those events that are not about blocks: segments, and running out. A caller
            with these alone leaves the short paths open (NOTE [Two paths] in core.py).
        on_freed: called once, as (address, size, stream), instead of with both events for a block that is free as soon
            as it is given back. Whoever gives it knows what it asked for: blocks that are handed out without further
            ado are not told to `on_event`, which leaves the short paths open too.
        stream_events: records the events for which freed blocks wait, and is asked for them at each request. Without
            it, blocks wait until `process_events` or `synchronize` is called, or memory runs out.
    """

    # Requests

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate ``size`` bytes on a stream: the address, or 0 when ``size`` is 0.

        Raises:
            OutOfMemory: the card has no room, after every retry.
        """
        # The short path of NOTE [Two paths] in core.py: keep it and _malloc_in_full saying the same.
        if self.plain and size > 0:
            rounded = (size + 511) & -512
            if rounded <= 1048576:
                shelf = self._small_shelves.get(stream)
                least_rest = 512
            else:
                shelf = self._large_shelves.get(stream)
                least_rest = 1048577
            if shelf is None:
                return self._malloc_in_full(size, stream)
            keys = shelf.keys
            probe = rounded << 48
            try:
                key = keys.pop(bisect_left(keys, probe))
            except IndexError:
                return self._malloc_in_full(size, stream)
            address = key & 0xFFFFFFFFFFFF
            block = self._blocks[address]
            stats = shelf.stats
            total = stats.total
            twin = stats.twin
            found = block.size
            rest = found - rounded
            after = block.next
            if rest >= least_rest:
                if self._spare:
                    tail = self._spare.pop()
                    tail.address = tail_address = address + rounded
                    tail.size = rest
                    tail.shelf = shelf
                    tail.state = 0
                else:
                    tail_address = address + rounded
                    tail = Block(tail_address, rest, shelf)
                tail.requested = block.requested
                tail.prev = block
                tail.next = after
                block.next = tail
                block.size = rounded
                block.key = probe | address
                self._blocks[tail_address] = tail
                tail.key = key = key - probe + rounded
                insort(keys, key)
                if after is not None:
                    after.prev = tail
                    stats.split_bytes_out += rounded
                elif block.prev is not None:
                    stats.split_bytes_out += rounded
                else:
                    stats.add_split(rest)
                    stats.add_split_block()
                found = rounded
            elif after is not None or block.prev is not None:
                stats.split_bytes_out += found
                stats.split_count_out += 1
            block.state = 1
            block.requested = size
            stats.count_in = count = stats.count_in + 1
            count -= stats.count_out
            if count > stats.count_peak:
                stats.count_peak = count
            count += twin.count_in - twin.count_out
            if count > total.count_peak:
                total.count_peak = count
            stats.bytes_in = count = stats.bytes_in + found
            count -= stats.bytes_out
            if count > stats.bytes_peak:
                stats.bytes_peak = count
            count += twin.bytes_in - twin.bytes_out
            if count > total.bytes_peak:
                total.bytes_peak = count
            stats.requested_in = count = stats.requested_in + size
            count -= stats.requested_out
            if count > stats.requested_peak:
                stats.requested_peak = count
            count += twin.requested_in - twin.requested_out
            if count > total.requested_peak:
                total.requested_peak = count
            return address
        return self._malloc_in_full(size, stream)

    def _malloc_in_full(self, size: int, stream: int) -> int:
        if size <= 0:
            return 0
        if self._stream_events is not None and self._pending and not self._captures:
            self._process_events(self._stream_events.passed)
        rounded = self._rounding.block(size)
        if size >= EXABYTE:
            raise self._out_of_memory(size, rounded)
        pool = self._pool_for(rounded, stream)
        block = self._take_free(pool, stream, rounded)
        if block is None:
            block = self._obtain(pool, stream, size, rounded)
        return self._hand_out(block, rounded, size)

    def free(self, address: int) -> None:
        """Give an allocation back; address 0 is ignored.

        Raises:
            ValueError: nothing is allocated there.
        """
        blocks = self._blocks
        block = blocks.get(address)
        if block is None or block.state != 1:
            if address == 0:
                return
            raise self._unknown(address)
        if not self.plain or block.uses is not None:
            self._give_back(block)
            return
        # The short path of NOTE [Two paths] in core.py: keep it and _give_back saying the same.
        shelf = block.shelf
        stats = shelf.stats
        keys = shelf.keys
        size = merged = block.size
        requested = block.requested
        if self._on_freed is not None:
            self._on_freed(address, requested, shelf.stream)
        stats.count_out += 1
        stats.bytes_out += size
        stats.requested_out += requested
        before = block.prev
        after = block.next
        block.state = 0
        if before is None and after is None:
            insort(keys, block.key)
            return
        change = 1
        if after is not None and after.state == 0:
            del keys[bisect_left(keys, after.key)], blocks[after.address]
            merged += after.size
            change = 0
            self._spare.append(after)
            block.next = after = after.next
            if after is not None:
                after.prev = block
            block.size = merged
        if before is not None and before.state == 0:
            del keys[bisect_left(keys, before.key)], blocks[address]
            merged += before.size
            change -= 1
            self._spare.append(block)
            before.next = after
            if after is not None:
                after.prev = before
            before.size = merged
            before.requested = requested
            block = before
            before = before.prev
        if merged != size:
            block.key = merged << 48 | block.address
        insort(keys, block.key)
        if before is None and after is None:
            stats.split_bytes_out += merged - size
            stats.split_count_out += 1 - change
            return
        stats.split_bytes_in = merged = stats.split_bytes_in + size
        merged -= stats.split_bytes_out
        if merged > stats.split_bytes_peak:
            stats.split_bytes_peak = merged
        twin = stats.twin
        merged += twin.split_bytes_in - twin.split_bytes_out
        if merged > stats.total.split_bytes_peak:
            stats.total.split_bytes_peak = merged
        if change > 0:
            stats.split_count_in = count = stats.split_count_in + 1
            count -= stats.split_count_out
            if count > stats.split_count_peak:
                stats.split_count_peak = count
            count += twin.split_count_in - twin.split_count_out
            if count > stats.total.split_count_peak:
                stats.total.split_count_peak = count
        elif change < 0:
            stats.split_count_out += 1

    def _unknown(self, address: int) -> ValueError:
        return ValueError(f"invalid device pointer: {address:#x} is not allocated on device {self.device}")

    def _allocated(self, address: int) -> Block:
        block = self._blocks.get(address)
        if block is None or block.state != ALLOCATED:
            raise self._unknown(address)
        return block

    def block_size(self, address: int) -> int:
        """Bytes of the block behind an allocation: the rounded request and unsplit slack.

        Raises:
            ValueError: nothing is allocated there.
        """
        return self._allocated(address).size

    # Streams

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses an allocation: once freed, it waits until that stream is done with it.

        Raises:
            ValueError: nothing is allocated there.
        """
        block = self._allocated(address)
        if stream == block.shelf.stream:
            return
        if block.uses is None:
            block.uses = {}
        block.uses[stream] = None
        if self._captures:
            self._capture_uses.setdefault(address, set()).add(stream)

    def process_events(self, streams: Iterable[int] | None = None) -> None:
        """Free the blocks that waited only for these streams (None: all), which are done with their work."""
        if self._captures:
            return
        if streams is None:
            self._process_events(lambda _stream, _address: True)
        else:
            done = frozenset(streams)
            self._process_events(lambda stream, _address: stream in done)

    def synchronize(self) -> None:
        """Finish everything on the device, as ``torch.cuda.synchronize`` does."""
        self.process_events()

    def complete_free(self, address: int) -> bool:
        """Finish the free of one pending block, as a recording shows it; whether there was one."""
        block = self._pending.get(address)
        if block is None:
            return False
        for stream, queue in tuple(self._events.items()):
            if block in queue:
                queue.remove(block)
            if not queue:
                del self._events[stream]
        if block in self._deferred:
            self._deferred.remove(block)
        block.uses, block.events = None, 0
        self._capture_uses.pop(address, None)
        self._complete(block)
        return True

    # The cache

    def empty_cache(self, pool_id: PoolId = NO_POOL) -> None:
        """Return cached memory to the driver, as ``torch.cuda.empty_cache``.

        Args:
            pool_id: only the memory of this private pool, which nothing may hold any more.
        """
        self._release_cached(pool_id)

    @property
    def config(self) -> AllocatorConfig:
        """The settings; they may be replaced at any time, as torch allows."""
        return self._config

    @config.setter
    def config(self, config: AllocatorConfig) -> None:
        self._set_config(config)

    @property
    def memory_fraction(self) -> float:
        """Share of the card that may be reserved, as ``torch.cuda.get_per_process_memory_fraction``."""
        return self._fraction

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the reserved bytes, as ``torch.cuda.set_per_process_memory_fraction``.

        Raises:
            ValueError: the fraction is not from 0 to 1.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._fraction = fraction
        self._limit = int(fraction * self.driver.total_bytes)
        self.refresh_plain()

    # Private pools

    def create_pool(self, pool_id: PoolId, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Make a private pool as ``torch.cuda.MemPool`` does, or hold an existing one once more.

        Args:
            pool_id: torch's pair of numbers, not (0, 0).
            use_on_oom: its free blocks may serve other requests before they fail.
            no_split: its blocks are handed out whole.
        """
        private = self._private.get(pool_id)
        if private is None:
            self._new_private_pool(pool_id, no_split=no_split)
        else:
            private.users += 1
        if use_on_oom and pool_id not in self._use_on_oom:
            self._use_on_oom.append(pool_id)

    def begin_pool(self, pool_id: PoolId, *, streams: Iterable[int] | None = None) -> None:
        """Serve requests from a private pool from here on; the pool is held until `release_pool`.

        Args:
            pool_id: the pool, made when it does not exist.
            streams: only the requests on these streams; None for all.

        Raises:
            ValueError: requests go to that pool already.
        """
        if any(found == pool_id for found, _ in self._captures):
            raise ValueError(f"beginAllocateToPool: already recording to {pool_id}")
        self.create_pool(pool_id)
        self._captures.append((pool_id, None if streams is None else frozenset(streams)))
        self.refresh_plain()

    def end_pool(self, pool_id: PoolId | None = None) -> None:
        """Stop serving requests from a private pool (None: the one begun last).

        Raises:
            ValueError: requests do not go to that pool.
        """
        for index in reversed(range(len(self._captures))):
            if pool_id is None or self._captures[index][0] == pool_id:
                del self._captures[index]
                self.refresh_plain()
                return
        raise ValueError(f"endAllocatePool: not currently recording to {pool_id}")

    def mark_capture_begin(self) -> None:
        """A graph is captured from here on (``markCaptureBegin``): a request that fails releases no cached memory."""
        self._capturing += 1

    def mark_capture_end(self) -> None:
        """The capture that began last is over (``markCaptureEnd``).

        Raises:
            ValueError: none is under way.
        """
        if not self._capturing:
            raise ValueError("markCaptureEnd: no capture is under way")
        self._capturing -= 1

    def release_pool(self, pool_id: PoolId) -> None:
        """Let go of a private pool; when nobody holds it, its free memory can go back to the driver.

        Raises:
            ValueError: nobody holds that pool.
        """
        private = self._private.get(pool_id)
        if private is None or private.users == 0:
            raise ValueError(f"releasePool: nothing holds the pool {pool_id}")
        private.users -= 1
        if private.users == 0 and pool_id in self._use_on_oom:
            self._use_on_oom.remove(pool_id)

    # Figures

    @property
    def allocated_bytes(self) -> int:
        """Bytes in blocks handed out, as ``torch.cuda.memory_allocated``."""
        return self._stats.current("bytes")

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver, as ``torch.cuda.memory_reserved``."""
        return self._stats.current("reserved")

    @property
    def active_bytes(self) -> int:
        """Bytes handed out or still used by other streams."""
        return self._stats.current("active_bytes")

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes in segments that hold something else too, as ``inactive_split_bytes`` of ``memory_stats``."""
        return self._stats.current("split_bytes")

    def figures(self) -> tuple[int, int, int]:
        """Allocated, active and reserved bytes at once."""
        small, large = self._stats.small, self._stats.large
        allocated = small.bytes_in - small.bytes_out + large.bytes_in - large.bytes_out
        return allocated, allocated + small.pending_bytes + large.pending_bytes, self._reserved

    @property
    def requested_bytes(self) -> int:
        """Bytes asked for, before rounding, in the active blocks."""
        return self._stats.current("requested")

    @property
    def peak_allocated_bytes(self) -> int:
        """Most allocated bytes since the last `reset_peak_stats`."""
        return self._stats.peak("bytes")

    @property
    def peak_reserved_bytes(self) -> int:
        """Most reserved bytes since the last `reset_peak_stats`."""
        return self._stats.peak("reserved")

    @property
    def peak_active_bytes(self) -> int:
        """Most active bytes since the last `reset_peak_stats`."""
        return self._stats.peak("active_bytes")

    def reset_peak_stats(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``."""
        self._stats.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """As ``torch.cuda.reset_accumulated_memory_stats``."""
        self._stats.reset_accumulated()

    def memory_stats(self) -> NestedStats:
        """The nested dictionary of ``torch._C._cuda_memoryStats``."""
        return self._stats.as_torch(
            max_split_size=self._reported_max_split,
            rejections=self._rules.throw_on_oom_option,
            private_pools=self._rules.private_pool_stats,
        )

    def memory_stats_flat(self) -> dict[str, int]:
        """The flat dictionary of ``torch.cuda.memory_stats``."""
        return flatten(self.memory_stats())

    def segments(self) -> list[Segment]:
        """The segments as in ``torch.cuda.memory._snapshot()["segments"]``, by address."""
        segments = describe_segments(self._blocks.values(), self.device)
        self._emit(AllocatorEventKind.SNAPSHOT, 0, sum(s["active_size"] for s in segments), 0)
        return segments
