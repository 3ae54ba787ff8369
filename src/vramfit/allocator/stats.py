"""Allocator statistics: few counters on the hot path, torch's full table on request.

A quantity is kept as what came in and what went out, ever; its current value is the difference. Three facts
keep the hot path short:

- Figures for all pools are sums over the small and the large pool; only their peaks are kept apart.
- ``active`` equals ``allocation`` plus the blocks that wait for other streams, so its peak is the greater of
  the allocation peak and of what was seen while blocks were waiting.
- Resetting the accumulated figures moves a base line instead of touching the counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NestedStats = dict[Any, Any]
"""Tables of tables of int by name; torch keys the one of the private pools by pairs of numbers."""

QUANTITIES = ("count", "bytes", "requested", "split_count", "split_bytes", "segments", "reserved")

_TORCH_NAMES = {
    "allocation": "count",
    "segment": "segments",
    "active": "active_count",
    "inactive_split": "split_count",
    "allocated_bytes": "bytes",
    "reserved_bytes": "reserved",
    "active_bytes": "active_bytes",
    "inactive_split_bytes": "split_bytes",
    "requested_bytes": "requested",
}
_POOL_NAMES = ("all", "small_pool", "large_pool")


class PoolStats:
    """Counters of the small or the large pool; of the pair's total only the peaks are used.

    Attributes:
        twin: the counters of the other pool.
        total: the peaks over both.
        count_in: blocks handed out ever (``_in``), taken back ever (``_out``), and the most at once
            (``_peak``). The same three counters of ``bytes`` in them, bytes ``requested`` for them, ``split_count`` and
            ``split_bytes`` of inactive split blocks, ``segments`` of cudaMalloc and ``reserved`` bytes.
        pending_count: freed blocks that other streams may still use, with ``pending_bytes``.
        active_count_peak: the most active blocks seen while any were pending, with ``active_bytes_peak``.
        bases: what the ``_in`` and ``_out`` counters were at the last reset of accumulated figures.
    """

    __slots__ = (
        *(f"{quantity}_{figure}" for quantity in QUANTITIES for figure in ("in", "out", "peak")),
        "active_bytes_peak",
        "active_count_peak",
        "bases",
        "pending_bytes",
        "pending_count",
        "total",
        "twin",
    )

    twin: PoolStats
    total: PoolStats

    def __init__(self) -> None:
        self.count_in = self.count_out = self.count_peak = 0
        self.bytes_in = self.bytes_out = self.bytes_peak = 0
        self.requested_in = self.requested_out = self.requested_peak = 0
        self.split_count_in = self.split_count_out = self.split_count_peak = 0
        self.split_bytes_in = self.split_bytes_out = self.split_bytes_peak = 0
        self.segments_in = self.segments_out = self.segments_peak = 0
        self.reserved_in = self.reserved_out = self.reserved_peak = 0
        self.pending_count = self.pending_bytes = 0
        self.active_count_peak = self.active_bytes_peak = 0
        self.bases: dict[str, tuple[int, int]] = {}

    def hand_out(self, size: int, requested: int) -> None:
        """Count a block of ``size`` bytes handed out."""
        twin, total = self.twin, self.total
        self.count_in += 1
        value = self.count_in - self.count_out
        if value > self.count_peak:
            self.count_peak = value
        value += twin.count_in - twin.count_out
        if value > total.count_peak:
            total.count_peak = value
        self.bytes_in += size
        value = self.bytes_in - self.bytes_out
        if value > self.bytes_peak:
            self.bytes_peak = value
        value += twin.bytes_in - twin.bytes_out
        if value > total.bytes_peak:
            total.bytes_peak = value
        self.requested_in += requested
        value = self.requested_in - self.requested_out
        if value > self.requested_peak:
            self.requested_peak = value
        value += twin.requested_in - twin.requested_out
        if value > total.requested_peak:
            total.requested_peak = value

    def note_active(self) -> None:
        """Compare the active blocks with their peaks, while some are pending."""
        for quantity in ("active_count", "active_bytes"):
            name = quantity + "_peak"
            value = self.current(quantity)
            setattr(self, name, max(getattr(self, name), value))
            value += self.twin.current(quantity)
            setattr(self.total, name, max(getattr(self.total, name), value))

    def add_split(self, size: int) -> None:
        """Count bytes that became inactive split ones."""
        self.split_bytes_in += size
        value = self.split_bytes_in - self.split_bytes_out
        if value > self.split_bytes_peak:
            self.split_bytes_peak = value
        twin = self.twin
        value += twin.split_bytes_in - twin.split_bytes_out
        if value > self.total.split_bytes_peak:
            self.total.split_bytes_peak = value

    def add_split_block(self) -> None:
        """Count a block that became an inactive split one."""
        self.split_count_in += 1
        value = self.split_count_in - self.split_count_out
        if value > self.split_count_peak:
            self.split_count_peak = value
        twin = self.twin
        value += twin.split_count_in - twin.split_count_out
        if value > self.total.split_count_peak:
            self.total.split_count_peak = value

    def current(self, quantity: str) -> int:
        """The current value of one of `QUANTITIES`, or of ``active_count`` or ``active_bytes``."""
        if quantity == "active_count":
            return self.count_in - self.count_out + self.pending_count
        if quantity == "active_bytes":
            return self.bytes_in - self.bytes_out + self.pending_bytes
        current: int = getattr(self, quantity + "_in") - getattr(self, quantity + "_out")
        return current

    def accumulated(self, quantity: str) -> tuple[int, int]:
        """What came in and what went out since the last reset."""
        if quantity in ("active_count", "active_bytes"):
            kept = "count" if quantity == "active_count" else "bytes"
            came = self.accumulated(kept)[0]
            before = self.bases.get("pending_" + kept, (0, 0))[0]
            pending: int = getattr(self, "pending_" + kept)
            return came, self.accumulated(kept)[1] - pending + before
        came_in, went_out = self.bases.get(quantity, (0, 0))
        return getattr(self, quantity + "_in") - came_in, getattr(self, quantity + "_out") - went_out

    def reset_accumulated(self) -> None:
        """Count ``allocated`` and ``freed`` from here on."""
        for quantity in QUANTITIES:
            self.bases[quantity] = (getattr(self, quantity + "_in"), getattr(self, quantity + "_out"))
        self.bases["pending_count"] = (self.pending_count, 0)
        self.bases["pending_bytes"] = (self.pending_bytes, 0)


@dataclass(slots=True)
class Gauge:
    """One rarely changing quantity: its current value, peak, and what was added and taken ever."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        """Raise the value."""
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def take(self, amount: int) -> None:
        """Lower the value."""
        self.current -= amount
        self.freed += amount

    def as_torch(self) -> NestedStats:
        """The four figures under torch's names."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class DeviceStats:
    """All statistics of one device (c10/core/CachingDeviceAllocator.h, ``DeviceStats``).

    Attributes:
        private: reserved bytes by private pool (all, small, large).
        num_alloc_retries: cache flushes because the driver had no memory left.
        num_ooms: requests that failed.
        num_sync_all_streams: waits for all pending blocks.
        num_device_alloc: calls of cudaMalloc and of mapping.
        num_device_free: calls of cudaFree and of unmapping.
        num_oom_rejections: requests turned down by ``throw_on_cudamalloc_oom``.
        oversize_allocations: blocks of at least max_split_size.
        oversize_segments: segments of at least max_split_size.
    """

    def __init__(self) -> None:
        self.small = PoolStats()
        self.large = PoolStats()
        self.total = PoolStats()
        self.small.twin, self.large.twin = self.large, self.small
        self.small.total = self.large.total = self.total
        self.private: dict[tuple[int, int], tuple[Gauge, Gauge, Gauge]] = {}
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_oom_rejections = 0
        self.oversize_allocations = Gauge()
        self.oversize_segments = Gauge()

    def current(self, quantity: str) -> int:
        """A current value over both pools."""
        return self.small.current(quantity) + self.large.current(quantity)

    def peak(self, quantity: str, stats: PoolStats | None = None) -> int:
        """The peak of one pool, or over both."""
        stats = self.total if stats is None else stats
        if quantity in ("active_count", "active_bytes"):
            settled = stats.count_peak if quantity == "active_count" else stats.bytes_peak
            waiting: int = getattr(stats, quantity + "_peak")
            return max(settled, waiting)
        peak: int = getattr(stats, quantity + "_peak")
        return peak

    def gauges_of(self, pool_id: tuple[int, int], *, small: bool) -> tuple[Gauge, Gauge]:
        """The gauges of a private pool that a change of its small or large pool moves."""
        gauges = self.private.setdefault(pool_id, (Gauge(), Gauge(), Gauge()))
        return gauges[0], gauges[1 if small else 2]

    def note_peak(self, stats: PoolStats, quantity: str) -> None:
        """Compare a value that has just risen with the pool's peak and with the total's."""
        name = quantity + "_peak"
        for owner, value in ((stats, stats.current(quantity)), (self.total, self.current(quantity))):
            if value > getattr(owner, name):
                setattr(owner, name, value)

    def reset_accumulated(self) -> None:
        """As ``torch.cuda.reset_accumulated_memory_stats``."""
        self.small.reset_accumulated()
        self.large.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0
        for gauge in self._gauges():
            gauge.allocated = gauge.freed = 0

    def reset_peaks(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``."""
        for quantity in (*QUANTITIES, "active_count", "active_bytes"):
            for stats in (self.small, self.large):
                setattr(stats, quantity + "_peak", stats.current(quantity))
            setattr(self.total, quantity + "_peak", self.current(quantity))
        for gauge in self._gauges():
            gauge.peak = gauge.current

    def _gauges(self) -> Iterator[Gauge]:
        yield self.oversize_allocations
        yield self.oversize_segments
        for gauges in self.private.values():
            yield from gauges

    def _table(self, quantity: str) -> NestedStats:
        small_in, small_out = self.small.accumulated(quantity)
        large_in, large_out = self.large.accumulated(quantity)
        rows = (
            (self.current(quantity), self.peak(quantity), small_in + large_in, small_out + large_out),
            (self.small.current(quantity), self.peak(quantity, self.small), small_in, small_out),
            (self.large.current(quantity), self.peak(quantity, self.large), large_in, large_out),
        )
        columns = ("current", "peak", "allocated", "freed")
        return {
            pool: dict(zip(columns, row, strict=True)) for pool, row in zip(_POOL_NAMES, rows, strict=True)
        }

    def as_torch(self, *, max_split_size: int, rejections: bool, private_pools: bool) -> NestedStats:
        """The nested dictionary of ``torch._C._cuda_memoryStats`` (torch/csrc/cuda/Module.cpp).

        Args:
            max_split_size: the setting, -1 for none.
            rejections: whether this torch counts ``num_oom_rejections``.
            private_pools: whether this torch has ``reserved_bytes_by_private_pools``.
        """
        result: NestedStats = {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "max_split_size": max_split_size,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
        }
        if rejections:
            result["num_oom_rejections"] = self.num_oom_rejections
        for torch_name, quantity in _TORCH_NAMES.items():
            result[torch_name] = self._table(quantity)
        if private_pools:
            result["reserved_bytes_by_private_pools"] = {
                pool_id: {name: gauge.as_torch() for name, gauge in zip(_POOL_NAMES, gauges, strict=True)}
                for pool_id, gauges in self.private.items()
            }
        result["oversize_allocations"] = self.oversize_allocations.as_torch()
        result["oversize_segments"] = self.oversize_segments.as_torch()
        return result


def flatten(nested: NestedStats) -> dict[str, int]:
    """As ``torch.cuda.memory_stats``: dotted keys in alphabetical order, pairs joined by ``_``."""
    flat: dict[str, int] = {}

    def walk(prefix: str, table: NestedStats) -> None:
        for key, value in table.items():
            name = "_".join(map(str, key)) if isinstance(key, tuple) else key
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                flat[prefix + name] = value

    walk("", nested)
    return dict(sorted(flat.items()))
