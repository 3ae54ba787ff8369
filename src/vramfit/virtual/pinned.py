"""Page-locked host memory: what torch's caching host allocator would hold."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from vramfit.allocator.stats import Gauge


class PinnedMemory:
    """The caching allocator of page-locked memory (ATen/core/CachingHostAllocator.h).

    A request is rounded up to a power of two; a freed block goes to the list of its size and serves only requests that
    round to the same size; nothing is given back to the system before `empty_cache`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._next = 1
        self._requests, self._segments = Gauge(), Gauge()
        self._active, self._reserved = Gauge(), Gauge()

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the system, whether in use or cached."""
        return self._reserved.current

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was held from the system."""
        return self._reserved.peak

    def allocate(self, nbytes: int, *, round_limit: int | None = None, cache_limit: int | None = None) -> int:
        """Take a block of at least `nbytes`; returns its handle, 0 for an empty request.

        A request larger than `round_limit` (``pinned_max_round_threshold_mb``) is not rounded; one larger than
        `cache_limit` (``pinned_max_cached_size_mb``) is neither rounded nor kept when it is freed.
        """
        if nbytes <= 0:
            return 0
        limits = [limit for limit in (round_limit, cache_limit) if limit is not None]
        size = nbytes if any(nbytes > limit for limit in limits) else 1 << (nbytes - 1).bit_length()
        with self._lock:
            if self._free[size]:
                handle = self._free[size].pop()
            else:
                handle = self._next
                self._next += 1
                self._sizes[handle] = size
                self._segments.add(1)
                self._reserved.add(size)
            self._requests.add(1)
            self._active.add(size)
        return handle

    def free(self, handle: int, *, cache_limit: int | None = None) -> None:
        """Give a block back: to the cache, or to the system if it is larger than `cache_limit`."""
        if not handle:
            return
        with self._lock:
            size = self._sizes[handle]
            self._requests.take(1)
            self._active.take(size)
            if cache_limit is not None and size > cache_limit:
                self._give_back(handle)
            else:
                self._free[size].append(handle)

    def empty_cache(self) -> None:
        """Give all unused blocks back to the system."""
        with self._lock:
            for handles in self._free.values():
                for handle in handles:
                    self._give_back(handle)
            self._free.clear()

    def _give_back(self, handle: int) -> None:
        self._segments.take(1)
        self._reserved.take(self._sizes.pop(handle))

    def stats(self) -> dict[str, Any]:
        """As ``torch.cuda.host_memory_stats_as_nested_dict()`` (torch/csrc/cuda/Module.cpp)."""
        no_time = {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0}
        return {
            "num_host_alloc": self._segments.allocated,
            "num_host_free": self._segments.freed,
            "allocations": asdict(self._segments),
            "active_requests": asdict(self._requests),
            "allocated_bytes": asdict(self._reserved),
            "active_bytes": asdict(self._active),
            "host_alloc_time": dict(no_time),
            "host_free_time": dict(no_time),
        }

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now."""
        for stat in (self._requests, self._segments, self._active, self._reserved):
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """Let the running totals start again from zero."""
        for stat in (self._requests, self._segments, self._active, self._reserved):
            stat.allocated = stat.freed = 0
