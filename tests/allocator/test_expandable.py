"""Expandable segments, each rule with its figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.units import GIB, MIB

ON = AllocatorConfig.parse("expandable_segments:True")


def make(total: int = 4 * GIB, config: AllocatorConfig = ON) -> tuple[CachingAllocator, list[tuple]]:
    events: list[tuple] = []
    base: list[int] = []

    def note(kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        del stream
        if kind.torch_name.startswith("segment"):
            base.append(address)
            events.append((kind.torch_name, (address - base[0]) // MIB, size // MIB))

    return CachingAllocator(Driver(total), config=config, on_event=note), events


def test_pages_are_2_mib_for_small_and_20_mib_for_large_requests() -> None:
    allocator, _ = make()
    allocator.malloc(512)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(3 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 42 * MIB  # 17 MiB were free: 13 more are one page
    assert allocator.allocated_bytes == 33 * MIB + 512


def test_the_page_of_large_segments_is_a_setting() -> None:
    allocator, _ = make(config=AllocatorConfig.parse("expandable_segments:True,large_segment_size_mb:12"))
    allocator.malloc(13 * MIB)
    assert allocator.reserved_bytes == 24 * MIB


def test_a_segment_grows_in_place_and_counts_as_no_segment() -> None:
    allocator, events = make()
    first = allocator.malloc(20 * MIB)
    second = allocator.malloc(25 * MIB)
    assert second == first + 20 * MIB
    assert events == [("segment_map", 0, 20), ("segment_map", 20, 40)]
    stats = allocator.memory_stats_flat()
    assert stats["segment.all.current"] == 0
    assert stats["num_device_alloc"] == 2
    assert stats["inactive_split.all.current"] == 0
    (segment,) = allocator.segments()
    assert segment["is_expandable"] and segment["total_size"] == 60 * MIB


def test_large_blocks_split_from_512_bytes_on() -> None:
    allocator, _ = make()
    address = allocator.malloc(20 * MIB - 512)
    assert allocator.block_size(address) == 20 * MIB - 512
    assert allocator.malloc(2 * MIB) == address + 20 * MIB - 512


def test_each_stream_has_its_own_segment() -> None:
    allocator, _ = make()
    one, other = allocator.malloc(20 * MIB, stream=0), allocator.malloc(20 * MIB, stream=3)
    # 9/8 of the card, in pages of 20 MiB.
    assert abs(other - one) == -(-(4 * GIB + GIB // 2) // (20 * MIB)) * 20 * MIB


def test_only_whole_pages_inside_free_blocks_are_unmapped() -> None:
    allocator, events = make()
    allocator.malloc(10 * MIB)
    middle = allocator.malloc(65 * MIB)
    allocator.malloc(5 * MIB)
    allocator.free(middle)
    events.clear()
    allocator.empty_cache()
    # Free from 10 to 75 MiB: the pages from 20 to 60 are wholly free.
    assert events == [("segment_unmap", 20, 40)]
    assert allocator.reserved_bytes == 40 * MIB
    assert [(s["total_size"] // MIB, len(s["blocks"])) for s in allocator.segments()] == [(20, 2), (20, 2)]


def test_unmapped_ranges_are_mapped_again_lowest_first_with_the_free_block_before() -> None:
    allocator, events = make()
    first = allocator.malloc(10 * MIB)
    middle = allocator.malloc(65 * MIB)
    allocator.malloc(5 * MIB)
    allocator.free(middle)
    allocator.empty_cache()
    events.clear()
    # 10 MiB free before the gap: 30 MiB need one page of it.
    assert allocator.malloc(30 * MIB) == first + 10 * MIB
    assert events == [("segment_map", 20, 20)]
    # 20 MiB of gap and 15 free behind it hold 35 MiB, for which the last page of the gap is mapped.
    assert allocator.malloc(35 * MIB) == first + 40 * MIB
    assert events[1:] == [("segment_map", 40, 20)]
    assert allocator.reserved_bytes == 80 * MIB


def test_a_range_that_is_too_small_is_passed_over() -> None:
    allocator, events = make()
    allocator.malloc(20 * MIB)
    gap = allocator.malloc(20 * MIB)
    allocator.malloc(20 * MIB)
    allocator.free(gap)
    allocator.empty_cache()
    events.clear()
    allocator.malloc(40 * MIB)
    assert events == [("segment_map", 60, 40)]


def test_a_wholly_unmapped_segment_gives_its_addresses_back() -> None:
    allocator, _ = make()
    address = allocator.malloc(20 * MIB)
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.segments() == [] and allocator.reserved_bytes == 0
    assert allocator.malloc(20 * MIB, stream=9) == address


def test_best_fit_counts_the_room_a_block_can_grow_into() -> None:
    allocator, _ = make()
    head = allocator.malloc(30 * MIB)  # 0 to 30 of 40 MiB, so that 10 MiB are free at the growing end
    tail = allocator.malloc(10 * MIB)
    allocator.malloc(20 * MIB)
    allocator.free(head)
    # The 30 MiB hole is larger than the 0 bytes at the end, but cannot grow.
    assert allocator.malloc(8 * MIB) == head
    assert tail == head + 30 * MIB


def test_the_growing_end_is_spared_for_requests_that_fit_nowhere_else() -> None:
    allocator, _ = make()
    hole = allocator.malloc(12 * MIB)
    keep = allocator.malloc(18 * MIB)  # 30 of 40 MiB taken: 10 MiB lie free at the end
    allocator.free(hole)
    # By size alone the 10 MiB at the end would fit 9 MiB best.
    assert allocator.malloc(9 * MIB) == hole
    assert keep == hole + 12 * MIB


def test_pages_mapped_before_memory_ran_out_stay() -> None:
    allocator, events = make(total=100 * MIB)
    a = allocator.malloc(20 * MIB)
    gap = allocator.malloc(40 * MIB)
    b = allocator.malloc(30 * MIB)
    allocator.free(gap)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB
    assert (a, b) == (gap - 20 * MIB, gap + 40 * MIB)
    events.clear()
    with pytest.raises(OutOfMemory):
        # Free and unmapped room enough behind b, but only 40 MiB of memory: 10 free and one page mapped.
        allocator.malloc(70 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    assert all(kind == "segment_map" or kind == "segment_unmap" for kind, *_ in events)


def test_classic_blocks_are_used_while_expandable_segments_are_on_but_not_the_reverse() -> None:
    allocator, _ = make(config=AllocatorConfig())
    classic = allocator.malloc(30 * MIB)
    allocator.free(classic)
    allocator.config = ON
    assert allocator.malloc(30 * MIB) == classic
    expandable = allocator.malloc(20 * MIB)
    allocator.free(expandable)
    allocator.config = AllocatorConfig()
    other = allocator.malloc(20 * MIB)
    assert other != expandable
    assert allocator.memory_stats_flat()["segment.all.current"] == 2
    allocator.config = ON
    assert allocator.malloc(20 * MIB) == expandable


@pytest.fixture
def sum_of() -> Callable[[list[dict]], int]:
    return lambda segments: sum(segment["total_size"] for segment in segments)


def test_a_snapshot_shows_one_entry_for_each_mapped_range(sum_of: Callable[[list[dict]], int]) -> None:
    allocator, _ = make()
    keep = [allocator.malloc(20 * MIB) for _ in range(5)]
    for index in (1, 3):
        allocator.free(keep[index])
    allocator.empty_cache()
    segments = allocator.segments()
    assert [s["address"] for s in segments] == [keep[0], keep[2], keep[4]]
    assert sum_of(segments) == allocator.reserved_bytes == 60 * MIB
