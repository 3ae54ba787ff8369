"""Running out of memory: the order of attempts, and what the error says."""

from __future__ import annotations

import pytest

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.allocator.release import torch_size
from vramfit.errors import OutOfMemory as AnyOutOfMemory
from vramfit.units import GIB, MIB


def make(conf: str = "", total: int = GIB, outside: int = 0) -> tuple[CachingAllocator, list[tuple]]:
    events: list[tuple] = []

    def note(kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        del address, stream
        events.append((kind.torch_name, size // MIB))

    config = AllocatorConfig.parse(conf)
    return CachingAllocator(Driver(total, outside), config=config, on_event=note), events


def test_cached_segments_are_freed_before_giving_up() -> None:
    allocator, events = make()
    a, b = allocator.malloc(400 * MIB), allocator.malloc(300 * MIB)
    allocator.free(a)
    allocator.free(b)
    events.clear()
    allocator.malloc(500 * MIB)
    # By stream, then size: the smaller one first.
    assert events == [("segment_free", 300), ("segment_free", 400), ("segment_alloc", 500), ("alloc", 500)]
    stats = allocator.memory_stats_flat()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_sync_all_streams"]) == (1, 0, 1)


def test_one_oversized_block_is_enough_when_it_is_large_enough() -> None:
    allocator, events = make("max_split_size_mb:100")
    a, b = allocator.malloc(400 * MIB), allocator.malloc(500 * MIB)
    allocator.free(a)
    allocator.free(b)
    events.clear()
    allocator.malloc(350 * MIB)  # 50 MiB more than the request: the 400 MiB may not serve it
    assert events == [("segment_free", 400), ("segment_alloc", 350), ("alloc", 350)]
    assert allocator.memory_stats_flat()["num_alloc_retries"] == 0


def test_several_oversized_blocks_are_freed_from_the_largest_down() -> None:
    allocator, events = make("max_split_size_mb:100")
    held = [allocator.malloc(size * MIB) for size in (200, 300, 400)]
    for address in held:
        allocator.free(address)
    events.clear()
    allocator.malloc(600 * MIB)
    assert events[:2] == [("segment_free", 400), ("segment_free", 300)]
    assert events[2:] == [("segment_alloc", 600), ("alloc", 600)]
    assert allocator.memory_stats_flat()["num_alloc_retries"] == 0


def test_pending_blocks_are_waited_for() -> None:
    allocator, events = make()
    a = allocator.malloc(700 * MIB)
    allocator.record_stream(a, 5)
    allocator.free(a)
    events.clear()
    allocator.malloc(600 * MIB)
    assert [name for name, _ in events] == ["free_completed", "segment_free", "segment_alloc", "alloc"]


def test_split_segments_stay_and_the_request_fails() -> None:
    allocator, events = make()
    a = allocator.malloc(600 * MIB)
    allocator.free(a)
    allocator.malloc(100 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(501 * MIB)
    error = caught.value
    assert isinstance(error, AnyOutOfMemory) and error.exit_code == 3
    assert events[-1] == ("oom", 501)
    assert (error.requested_bytes, error.rounded_bytes, error.segment_bytes) == (
        501 * MIB,
        501 * MIB,
        502 * MIB,
    )
    assert (error.free_bytes, error.total_bytes) == (424 * MIB, GIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (100 * MIB, 600 * MIB)
    stats = allocator.memory_stats_flat()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)
    assert allocator.malloc(500 * MIB) == a + 100 * MIB  # the allocator goes on working


def test_a_block_that_waiting_made_free_is_not_looked_at_again() -> None:
    # As in torch: after the wait only the driver is asked (its issue 189504).
    allocator, _ = make()
    a, _keep = allocator.malloc(500 * MIB), allocator.malloc(500 * MIB)
    allocator.free(a)
    b, _rest = allocator.malloc(300 * MIB), allocator.malloc(200 * MIB)
    allocator.record_stream(b, 5)
    allocator.free(b)
    with pytest.raises(OutOfMemory):
        allocator.malloc(250 * MIB)
    assert allocator.malloc(250 * MIB) == a


def test_the_message_is_torchs() -> None:
    allocator, _ = make(total=24 * GIB, outside=300 * MIB)
    allocator.malloc(20 * GIB)
    first = allocator.malloc(100 * MIB)
    allocator.malloc(50 * MIB)
    allocator.free(first)
    allocator.malloc(10 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(4 * GIB)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which "
        "3.56 GiB is free. Including non-PyTorch memory, this process has 20.44 GiB memory in use. "
        "Of the allocated memory 20.06 GiB is allocated by PyTorch, and 90.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def test_an_exabyte_is_refused_at_once() -> None:
    allocator, events = make()
    with pytest.raises(OutOfMemory, match="more than 1EB memory"):
        allocator.malloc(1 << 60)
    assert events == [] and allocator.memory_stats_flat()["num_ooms"] == 0


def test_the_message_names_the_fraction() -> None:
    allocator, _ = make(total=24 * GIB)
    allocator.set_memory_fraction(0.5)
    with pytest.raises(
        OutOfMemory, match=r"memory in use\. 12\.00 GiB allowed; Of the allocated memory 0 bytes"
    ):
        allocator.malloc(13 * GIB)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + MIB // 2, "1.50 MiB"),
        (GIB, "1024.00 MiB"),
        (2 * GIB, "2.00 GiB"),
        (2048 * GIB, "2048.00 GiB"),
    ],
)
def test_sizes_are_written_as_torch_writes_them(size: int, text: str) -> None:
    assert torch_size(size) == text


def test_the_fraction_limits_what_is_reserved_to_the_byte() -> None:
    allocator, _ = make()
    allocator.set_memory_fraction(0.5)
    assert allocator.memory_fraction == 0.5
    allocator.malloc(492 * MIB)
    allocator.malloc(5 * MIB)  # 20 MiB: exactly 512
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(16 * MIB)
    assert caught.value.allowed_bytes == 512 * MIB
    assert caught.value.free_bytes == 512 * MIB
    allocator.set_memory_fraction(1.0)
    allocator.malloc(16 * MIB)
    with pytest.raises(ValueError, match=r"Invalid fraction value: 1\.5"):
        allocator.set_memory_fraction(1.5)


def test_the_fraction_may_come_from_the_settings() -> None:
    allocator, _ = make("per_process_memory_fraction:0.5")
    with pytest.raises(OutOfMemory):
        allocator.malloc(600 * MIB)
    allocator.config = AllocatorConfig()
    allocator.malloc(600 * MIB)


def test_throw_on_cudamalloc_oom_gives_up_without_retries() -> None:
    allocator, events = make("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True")
    allocator.free(allocator.malloc(300 * MIB))
    events.clear()
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(400 * MIB)
    assert str(caught.value) == (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 400.00 MiB"
    )
    assert not [name for name, _ in events if name == "segment_free"]
    stats = allocator.memory_stats_flat()
    assert (stats["num_oom_rejections"], stats["num_alloc_retries"]) == (1, 0)


def test_expandable_segments_retry_too() -> None:
    allocator, events = make("expandable_segments:True")
    a = allocator.malloc(600 * MIB, stream=0)
    allocator.free(a)
    events.clear()
    allocator.malloc(600 * MIB, stream=3)
    assert [name for name, _ in events] == ["segment_unmap", "segment_map", "alloc"]
    assert allocator.memory_stats_flat()["num_alloc_retries"] == 1
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(600 * MIB, stream=0)
    assert caught.value.free_bytes == 424 * MIB
