"""The rules of classic segments, each with its figures."""

from __future__ import annotations

import pytest

from vramfit.allocator import AllocatorConfig, CachingAllocator, Driver
from vramfit.allocator.core import Rounding
from vramfit.units import GIB, KIB, MIB


def make(conf: str = "", total: int = 4 * GIB) -> CachingAllocator:
    return CachingAllocator(Driver(total), config=AllocatorConfig.parse(conf))


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (GIB, GIB, GIB),
    ],
)
def test_sizes_of_blocks_and_segments(size: int, block: int, segment: int) -> None:
    rounding = Rounding(AllocatorConfig())
    assert rounding.block(size) == block
    assert rounding.segment(block) == segment
    allocator = make()
    allocator.malloc(size)
    assert allocator.reserved_bytes == segment
    assert allocator.requested_bytes == size


def test_nothing_is_allocated_for_no_bytes() -> None:
    allocator = make()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.memory_stats_flat()["allocation.all.allocated"] == 0


def test_roundup_power2_divisions_round_to_equal_steps() -> None:
    # The example of torch's own comment: 1200 with 4 divisions gives 1280 (here times 1 KiB).
    rounding = Rounding(AllocatorConfig.parse("roundup_power2_divisions:4"))
    assert rounding.block(1200 * KIB) == 1280 * KIB
    assert rounding.block(1024 * KIB) == 1024 * KIB
    assert rounding.block(1793 * KIB) == 2048 * KIB
    assert rounding.block(2048) == 2048
    assert rounding.block(2049) == 2560  # above 512 x 4
    assert rounding.block(1700) == 2048  # not above 512 x 4: to 512 bytes


def test_roundup_power2_divisions_by_interval() -> None:
    rounding = Rounding(AllocatorConfig.parse("roundup_power2_divisions:[1:2,2:8,4:0,>:1]"))
    assert rounding.block(1100 * KIB) == 1536 * KIB
    assert rounding.block(600 * KIB) == 768 * KIB  # below 1 MiB the first interval counts
    assert rounding.block(2049 * KIB) == 2304 * KIB
    assert rounding.block(4097 * KIB) == 4097 * KIB
    assert rounding.block(9 * MIB + 1) == 9 * MIB + 512


def test_the_smallest_fitting_block_is_taken_and_the_lowest_among_equals() -> None:
    allocator = make()
    sizes = [40, 30, 20, 30]
    addresses = [allocator.malloc(size * MIB) for size in sizes]
    for address in reversed(addresses):
        allocator.free(address)
    assert allocator.malloc(19 * MIB + 1) == addresses[2]
    assert addresses[3] < addresses[1]  # the driver's addresses fall
    assert allocator.malloc(30 * MIB) == addresses[3]
    assert allocator.malloc(30 * MIB) == addresses[1]
    assert allocator.malloc(30 * MIB) == addresses[0]  # split: 10 MiB are left
    assert allocator.reserved_bytes == 120 * MIB


def test_streams_and_pools_do_not_share_blocks() -> None:
    allocator = make()
    first = allocator.malloc(MIB, stream=0)
    allocator.free(first)
    assert allocator.malloc(MIB, stream=1) != first
    assert allocator.reserved_bytes == 4 * MIB
    large = allocator.malloc(20 * MIB)
    allocator.free(large)
    allocator.malloc(4 * KIB)  # small: fits the free 2 MiB segment, not the free 20 MiB one
    assert allocator.reserved_bytes == 24 * MIB


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (19 * MIB, 20 * MIB),  # 1 MiB left: kept
        (19 * MIB - 512, 19 * MIB - 512),  # more than 1 MiB left: split
    ],
)
def test_large_blocks_split_when_more_than_1_mib_is_left(size: int, block: int) -> None:
    allocator = make()
    allocator.free(allocator.malloc(20 * MIB))
    address = allocator.malloc(size)
    assert allocator.block_size(address) == block
    assert allocator.allocated_bytes == block


def test_small_blocks_split_from_512_bytes_on() -> None:
    allocator = make()
    first, second = allocator.malloc(MIB), allocator.malloc(MIB - 512)
    assert second == first + MIB
    assert allocator.malloc(512) == first + 2 * MIB - 512
    assert allocator.reserved_bytes == 2 * MIB


def test_free_blocks_merge_with_both_neighbours() -> None:
    allocator = make()
    addresses = [allocator.malloc(512 * KIB) for _ in range(4)]
    for index in (0, 2):
        allocator.free(addresses[index])
    assert [b["size"] for b in allocator.segments()[0]["blocks"]] == [512 * KIB] * 4
    allocator.free(addresses[1])
    assert [b["size"] for b in allocator.segments()[0]["blocks"]] == [1536 * KIB, 512 * KIB]
    allocator.free(addresses[3])
    assert [b["size"] for b in allocator.segments()[0]["blocks"]] == [2 * MIB]


def test_what_is_not_allocated_cannot_be_freed() -> None:
    allocator = make()
    address = allocator.malloc(MIB)
    allocator.free(address)
    for wrong in (address, address + 512, 12345):
        with pytest.raises(ValueError, match="invalid device pointer"):
            allocator.free(wrong)
    with pytest.raises(ValueError, match="is not allocated on device 0"):
        allocator.block_size(address)


def test_large_segment_size_is_a_setting() -> None:
    allocator = make("large_segment_size_mb:32")
    allocator.malloc(2 * MIB)
    assert allocator.reserved_bytes == 32 * MIB
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 32 * MIB  # the rest of the segment serves it
    allocator.malloc(24 * MIB)
    assert allocator.reserved_bytes == 56 * MIB


def test_oversized_blocks_serve_only_oversized_requests() -> None:
    allocator = make("max_split_size_mb:100")
    big = allocator.malloc(200 * MIB)
    allocator.free(big)
    small = allocator.malloc(50 * MIB)  # would have split the 200 MiB
    assert small != big
    assert allocator.reserved_bytes == 250 * MIB
    # 180 < 200 < 180 + 20 holds not: the block may be less than 20 MiB larger than the request.
    other = allocator.malloc(180 * MIB)
    assert other != big
    taken = allocator.malloc(180 * MIB + 512)
    assert taken == big
    assert allocator.block_size(taken) == 200 * MIB
    stats = allocator.memory_stats_flat()
    assert stats["max_split_size"] == 100 * MIB
    assert stats["oversize_allocations.current"] == 2
    assert stats["oversize_segments.allocated"] == 2


def test_max_non_split_rounding_widens_what_an_oversized_block_serves() -> None:
    allocator = make("max_split_size_mb:100,max_non_split_rounding_mb:64")
    big = allocator.malloc(200 * MIB)
    allocator.free(big)
    assert allocator.malloc(140 * MIB) == big


def test_empty_cache_frees_whole_segments_only() -> None:
    allocator = make()
    keep, _ = allocator.malloc(5 * MIB), allocator.malloc(5 * MIB)
    gone = allocator.malloc(30 * MIB)
    allocator.free(keep)
    allocator.free(gone)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.driver.mapped_bytes == 20 * MIB
    assert allocator.memory_stats_flat()["segment.all.freed"] == 1


def test_garbage_collection_frees_the_oldest_cached_segments() -> None:
    allocator = make("garbage_collection_threshold:0.5,per_process_memory_fraction:0.25", total=4 * GIB)
    allocator.free(allocator.malloc(300 * MIB))
    allocator.malloc(30 * MIB, stream=1)  # two searches that the 300 MiB lie through
    young = allocator.malloc(250 * MIB, stream=2)
    allocator.free(young)
    assert allocator.reserved_bytes == 580 * MIB
    # 580 MiB exceed half of the allowed 1 GiB: what is older than the average goes first.
    allocator.malloc(400 * MIB)
    assert allocator.reserved_bytes == 680 * MIB
    assert allocator.malloc(250 * MIB, stream=2) == young
    assert allocator.memory_stats_flat()["num_alloc_retries"] == 0


def test_garbage_collection_needs_a_fraction() -> None:
    allocator = make("garbage_collection_threshold:0.1", total=GIB)
    allocator.free(allocator.malloc(300 * MIB))
    allocator.malloc(400 * MIB)
    assert allocator.reserved_bytes == 700 * MIB
