"""Statistics: torch's keys, and how each figure moves."""

from __future__ import annotations

from vramfit.allocator import AllocatorConfig, CachingAllocator, Driver
from vramfit.units import GIB, MIB

ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "max_split_size",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
PARTS = ("current", "peak", "allocated", "freed")


def make(version: tuple[int, int] = (2, 13), conf: str = "") -> CachingAllocator:
    return CachingAllocator(Driver(4 * GIB), config=AllocatorConfig.parse(conf), torch_version=version)


def test_the_keys_are_torchs() -> None:
    nested = make().memory_stats()
    assert set(nested) == {
        *ARRAYS,
        *COUNTERS,
        "num_oom_rejections",
        "oversize_allocations",
        "oversize_segments",
        "reserved_bytes_by_private_pools",
    }
    for name in ARRAYS:
        assert list(nested[name]) == ["all", "small_pool", "large_pool"]
        assert all(tuple(table) == PARTS for table in nested[name].values())
    assert tuple(nested["oversize_segments"]) == PARTS
    assert nested["max_split_size"] == -1


def test_the_flat_keys_are_torchs_in_order() -> None:
    expected = {
        f"{array}.{pool}.{part}"
        for array in ARRAYS
        for pool in ("all", "small_pool", "large_pool")
        for part in PARTS
    }
    expected |= {f"{name}.{part}" for name in ("oversize_allocations", "oversize_segments") for part in PARTS}
    expected |= {*COUNTERS, "num_oom_rejections"}
    assert list(make().memory_stats_flat()) == sorted(expected)


def test_older_versions_count_less() -> None:
    assert "num_oom_rejections" in make((2, 12)).memory_stats()
    assert "reserved_bytes_by_private_pools" not in make((2, 12)).memory_stats()
    assert "num_oom_rejections" not in make((2, 11)).memory_stats()


def test_figures_of_one_request() -> None:
    allocator = make()
    allocator.malloc(3 * MIB + 1)
    stats = allocator.memory_stats_flat()
    for pool in ("all", "large_pool"):
        assert stats[f"allocated_bytes.{pool}.current"] == 3 * MIB + 512
        assert stats[f"requested_bytes.{pool}.current"] == 3 * MIB + 1
        assert stats[f"reserved_bytes.{pool}.peak"] == 20 * MIB
        assert stats[f"segment.{pool}.allocated"] == 1
        assert stats[f"inactive_split.{pool}.current"] == 1
        assert stats[f"inactive_split_bytes.{pool}.current"] == 17 * MIB - 512
    assert not [name for name, value in stats.items() if "small_pool" in name and value]


def test_figures_after_a_free_and_a_merge() -> None:
    allocator = make()
    first, second = allocator.malloc(3 * MIB), allocator.malloc(4 * MIB)
    allocator.free(first)
    stats = allocator.memory_stats_flat()
    assert stats["inactive_split.all.current"] == 2
    assert stats["inactive_split_bytes.all.current"] == 16 * MIB
    assert stats["inactive_split_bytes.all.peak"] == 17 * MIB
    allocator.free(second)
    stats = allocator.memory_stats_flat()
    assert stats["inactive_split.all.current"] == stats["inactive_split_bytes.all.current"] == 0
    assert stats["inactive_split.all.peak"] == 2
    assert stats["inactive_split.all.freed"] == stats["inactive_split.all.allocated"] == 2
    assert stats["allocation.all.freed"] == 2
    assert stats["allocated_bytes.all.peak"] == 7 * MIB
    assert stats["allocated_bytes.all.freed"] == 7 * MIB


def test_the_peak_of_all_is_not_the_sum_of_the_peaks() -> None:
    allocator = make()
    allocator.free(allocator.malloc(MIB))
    allocator.malloc(20 * MIB)
    stats = allocator.memory_stats_flat()
    assert stats["allocated_bytes.small_pool.peak"] == MIB
    assert stats["allocated_bytes.large_pool.peak"] == 20 * MIB
    assert stats["allocated_bytes.all.peak"] == 20 * MIB


def test_resetting_peaks() -> None:
    allocator = make()
    address = allocator.malloc(30 * MIB)
    allocator.malloc(10 * MIB)
    allocator.free(address)
    allocator.empty_cache()
    allocator.reset_peak_stats()
    assert allocator.peak_allocated_bytes == allocator.peak_active_bytes == 10 * MIB
    assert allocator.peak_reserved_bytes == 10 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.peak_allocated_bytes == 15 * MIB
    assert allocator.peak_reserved_bytes == 30 * MIB


def test_resetting_accumulated_figures_keeps_the_current_ones() -> None:
    allocator = make()
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    allocator.malloc(512)
    allocator.reset_accumulated_stats()
    stats = allocator.memory_stats_flat()
    assert not [n for n, v in stats.items() if n.endswith((".allocated", ".freed")) and v]
    assert stats["num_device_alloc"] == 0
    assert stats["reserved_bytes.all.current"] == 32 * MIB
    allocator.synchronize()
    stats = allocator.memory_stats_flat()
    assert stats["active_bytes.all.freed"] == 30 * MIB
    assert stats["allocated_bytes.all.freed"] == 0


def test_max_split_size_is_reported_as_it_was_at_the_start() -> None:
    allocator = make(conf="max_split_size_mb:64")
    allocator.config = AllocatorConfig()
    assert allocator.memory_stats()["max_split_size"] == 64 * MIB
