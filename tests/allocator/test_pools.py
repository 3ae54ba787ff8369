"""Private pools: CUDA graphs and torch.cuda.MemPool."""

from __future__ import annotations

import pytest

from vramfit.allocator import AllocatorConfig, CachingAllocator, Driver, OutOfMemory
from vramfit.units import GIB, MIB

POOL = (0, 1)


def make(conf: str = "", total: int = GIB) -> CachingAllocator:
    return CachingAllocator(Driver(total), config=AllocatorConfig.parse(conf))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_pool_keeps_its_memory_to_itself(conf: str) -> None:
    allocator = make(conf)
    common = allocator.malloc(20 * MIB)
    allocator.free(common)
    allocator.begin_pool(POOL)
    inside = allocator.malloc(20 * MIB)
    allocator.free(inside)
    assert inside != common
    assert allocator.malloc(20 * MIB) == inside
    allocator.free(inside)
    allocator.end_pool(POOL)
    assert allocator.malloc(20 * MIB) == common
    allocator.free(common)
    allocator.empty_cache()  # the pool is held: its memory stays
    assert allocator.reserved_bytes == 20 * MIB
    assert [s["segment_pool_id"] for s in allocator.segments()] == [POOL]
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == []


def test_only_the_given_streams_go_to_the_pool() -> None:
    allocator = make()
    allocator.begin_pool(POOL, streams=[4])
    allocator.malloc(20 * MIB, stream=0)
    allocator.malloc(20 * MIB, stream=4)
    assert {s["stream"]: s["segment_pool_id"] for s in allocator.segments()} == {0: (0, 0), 4: POOL}


def test_a_pool_lives_as_long_as_anything_holds_it() -> None:
    allocator = make()
    allocator.create_pool(POOL)  # a MemPool object
    allocator.begin_pool(POOL)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.end_pool()
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.release_pool(POOL)
    with pytest.raises(ValueError, match="nothing holds the pool"):
        allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert allocator.reserved_bytes == 0
    with pytest.raises(ValueError, match="nothing holds the pool"):
        allocator.release_pool(POOL)


def test_emptying_one_pool_leaves_the_rest_alone() -> None:
    allocator = make()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.begin_pool(POOL)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.end_pool(POOL)
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert allocator.reserved_bytes == 30 * MIB


def test_a_tensor_keeps_a_released_pool() -> None:
    allocator = make()
    allocator.begin_pool(POOL)
    address = allocator.malloc(20 * MIB)
    allocator.end_pool(POOL)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_nothing_is_flushed_while_a_capture_runs() -> None:
    allocator = make()
    allocator.free(allocator.malloc(700 * MIB))
    allocator.begin_pool(POOL)
    allocator.mark_capture_begin()
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(400 * MIB)
    assert caught.value.reserved_bytes == 700 * MIB
    allocator.mark_capture_end()
    allocator.end_pool(POOL)
    allocator.malloc(750 * MIB)  # now the 700 MiB go first


def test_the_error_names_what_private_pools_keep() -> None:
    allocator = make()
    allocator.begin_pool(POOL)
    allocator.free(allocator.malloc(300 * MIB))
    allocator.end_pool(POOL)
    with pytest.raises(
        OutOfMemory, match=r"with 300\.00 MiB allocated in private pools \(e\.g\., CUDA Graphs\), and 0"
    ):
        allocator.malloc(900 * MIB)


def test_a_pool_may_serve_as_the_last_resort() -> None:
    allocator = make()
    allocator.create_pool(POOL, use_on_oom=True)
    allocator.begin_pool(POOL)
    spare = allocator.malloc(600 * MIB)
    allocator.free(spare)
    allocator.end_pool(POOL)
    allocator.release_pool(POOL)
    assert allocator.malloc(500 * MIB) == spare


def test_a_pool_for_shortages_serves_before_cached_memory_is_released() -> None:
    """github.com/pytorch/pytorch/pull/169699; a request that another pool serves does not take it."""
    allocator = make()
    allocator.create_pool(POOL, use_on_oom=True)
    allocator.begin_pool(POOL)
    spare = allocator.malloc(500 * MIB)
    allocator.free(spare)
    allocator.end_pool(POOL)
    allocator.release_pool(POOL)
    cached = allocator.malloc(400 * MIB)
    allocator.free(cached)
    taken = allocator.malloc(450 * MIB)
    assert taken == spare
    assert allocator.reserved_bytes == 900 * MIB  # what was cached is there still
    assert allocator.memory_stats_flat()["num_alloc_retries"] == 0
    allocator.malloc(450 * MIB)  # now it is released
    assert allocator.reserved_bytes == 950 * MIB
    allocator.free(taken)
    allocator.release_pool(POOL)  # the object is gone, and what was free in it is no more than cached memory
    allocator.malloc(450 * MIB)
    assert allocator.reserved_bytes == 900 * MIB


@pytest.mark.parametrize(("version", "releases"), [((2, 12), False), ((2, 13), True)])
def test_requests_in_a_pool_release_cached_memory_but_not_in_a_capture(
    version: tuple[int, int], releases: bool
) -> None:
    allocator = CachingAllocator(Driver(GIB), torch_version=version)
    allocator.free(allocator.malloc(600 * MIB))
    allocator.begin_pool(POOL)
    allocator.mark_capture_begin()
    with pytest.raises(OutOfMemory):
        allocator.malloc(500 * MIB)
    allocator.mark_capture_end()
    with pytest.raises(ValueError, match="no capture"):
        allocator.mark_capture_end()
    if releases:
        allocator.malloc(500 * MIB)
        assert allocator.reserved_bytes == 500 * MIB
    else:
        with pytest.raises(OutOfMemory):
            allocator.malloc(500 * MIB)
        assert allocator.reserved_bytes == 600 * MIB


def test_a_pool_without_splits_hands_out_whole_segments() -> None:
    allocator = make()
    allocator.create_pool(POOL, no_split=True)
    allocator.begin_pool(POOL)
    assert allocator.block_size(allocator.malloc(3 * MIB)) == 20 * MIB
    assert allocator.block_size(allocator.malloc(512)) == 2 * MIB


def test_a_pool_cannot_be_begun_twice_or_ended_unbegun() -> None:
    allocator = make()
    allocator.begin_pool(POOL)
    with pytest.raises(ValueError, match="already recording"):
        allocator.begin_pool(POOL)
    allocator.end_pool(POOL)
    with pytest.raises(ValueError, match="not currently recording"):
        allocator.end_pool(POOL)


def test_frees_during_a_capture_wait_for_its_end() -> None:
    allocator = make()
    before = allocator.malloc(20 * MIB)
    allocator.record_stream(before, 5)
    allocator.begin_pool(POOL)
    inside = allocator.malloc(30 * MIB)
    allocator.record_stream(inside, 6)
    allocator.free(before)
    allocator.free(inside)
    allocator.synchronize()  # cannot ask events while capturing
    assert allocator.active_bytes == 50 * MIB
    allocator.end_pool(POOL)
    allocator.process_events([])
    # The stream of the capture itself needs no event; the one recorded before does.
    assert allocator.active_bytes == 20 * MIB
    allocator.process_events([5])
    assert allocator.active_bytes == 0


def test_reserved_bytes_are_counted_by_pool() -> None:
    allocator = make()
    allocator.begin_pool(POOL)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(512)
    allocator.end_pool(POOL)
    name = "reserved_bytes_by_private_pools.0_1"
    stats = allocator.memory_stats_flat()
    assert [stats[f"{name}.{pool}.current"] for pool in ("all", "small_pool", "large_pool")] == [
        22 * MIB,
        2 * MIB,
        20 * MIB,
    ]
    allocator.release_pool(POOL)
    allocator.empty_cache()
    stats = allocator.memory_stats_flat()
    assert stats[f"{name}.all.current"] == 2 * MIB
    assert stats[f"{name}.all.peak"] == 22 * MIB
    assert stats[f"{name}.all.freed"] == 20 * MIB
