"""record_stream: blocks that other streams may still use."""

from __future__ import annotations

from vramfit.allocator import AllocatorEventKind, CachingAllocator, Driver
from vramfit.units import GIB, MIB


def make(**options: object) -> tuple[CachingAllocator, list[str]]:
    events: list[str] = []

    def note(kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        del address, size, stream
        events.append(kind.torch_name)

    return CachingAllocator(Driver(4 * GIB), on_event=note, **options), events


def test_a_block_waits_for_the_other_stream() -> None:
    allocator, events = make()
    address = allocator.malloc(20 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert events[-1] == "free_requested"
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 20 * MIB)
    (block,) = allocator.segments()[0]["blocks"]
    assert block["state"] == "active_pending_free"
    assert allocator.malloc(20 * MIB) != address
    allocator.process_events([5])
    assert "free_completed" in events
    assert allocator.active_bytes == 20 * MIB
    assert allocator.malloc(20 * MIB) == address


def test_the_own_stream_needs_no_waiting() -> None:
    allocator, events = make()
    address = allocator.malloc(20 * MIB, stream=5)
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert events[-2:] == ["free_requested", "free_completed"]


def test_every_stream_has_to_be_done() -> None:
    allocator, _ = make()
    address = allocator.malloc(MIB)
    for stream in (5, 6, 5):
        allocator.record_stream(address, stream)
    allocator.free(address)
    allocator.process_events([5])
    assert allocator.active_bytes == MIB
    allocator.process_events([6])
    assert allocator.active_bytes == 0


def test_a_pending_neighbour_does_not_merge() -> None:
    allocator, _ = make()
    first, second = allocator.malloc(MIB), allocator.malloc(MIB)
    allocator.record_stream(first, 5)
    allocator.free(first)
    allocator.free(second)
    assert len(allocator.segments()[0]["blocks"]) == 2
    allocator.synchronize()
    assert len(allocator.segments()[0]["blocks"]) == 1


def test_events_are_asked_at_each_request_when_there_is_somebody_to_ask() -> None:
    done: set[int] = set()

    class Events:
        def record(self, stream: int, address: int) -> None:
            pass

        def passed(self, stream: int, address: int) -> bool:
            return stream in done

    allocator, _ = make(stream_events=Events())
    address = allocator.malloc(20 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert allocator.malloc(20 * MIB) != address
    done.add(5)
    assert allocator.malloc(20 * MIB) == address


def test_emptying_the_cache_waits_for_all_streams() -> None:
    allocator, _ = make()
    address = allocator.malloc(20 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.memory_stats_flat()["num_sync_all_streams"] == 1


def test_a_recording_can_finish_one_free() -> None:
    allocator, _ = make()
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    for address in (first, second):
        allocator.record_stream(address, 5)
        allocator.free(address)
    assert allocator.complete_free(second)
    assert not allocator.complete_free(second)
    assert allocator.malloc(20 * MIB) == second
    allocator.synchronize()
    assert allocator.malloc(20 * MIB) == first


def test_the_active_peak_counts_what_waits() -> None:
    allocator, _ = make()
    for _ in range(3):
        address = allocator.malloc(20 * MIB)
        allocator.record_stream(address, 5)
        allocator.free(address)
    allocator.synchronize()
    assert allocator.peak_allocated_bytes == 20 * MIB
    assert allocator.peak_active_bytes == 60 * MIB
    stats = allocator.memory_stats_flat()
    assert (stats["active.all.peak"], stats["allocation.all.peak"]) == (3, 1)
    allocator.reset_peak_stats()
    assert allocator.peak_active_bytes == 0
