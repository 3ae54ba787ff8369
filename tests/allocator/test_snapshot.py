"""Segments in the layout of torch's snapshots."""

from __future__ import annotations

from vramfit.allocator import AllocatorEventKind, CachingAllocator, Driver
from vramfit.units import GIB, MIB


def test_a_segment_has_torchs_keys_and_figures() -> None:
    allocator = CachingAllocator(Driver(4 * GIB), device=1)
    first = allocator.malloc(MIB - 100, stream=7)
    second = allocator.malloc(1000, stream=7)
    allocator.record_stream(second, 0)
    allocator.free(second)
    (segment,) = allocator.segments()
    blocks = segment.pop("blocks")
    assert segment == {
        "device": 1,
        "address": first,
        "total_size": 2 * MIB,
        "allocated_size": MIB,
        "active_size": MIB + 1024,
        "requested_size": MIB - 100 + 1000,
        "stream": 7,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
    }
    assert [(b["address"] - first, b["size"], b["requested_size"], b["state"]) for b in blocks] == [
        (0, MIB, MIB - 100, "active_allocated"),
        (MIB, 1024, 1000, "active_pending_free"),
        (MIB + 1024, MIB - 1024, 0, "inactive"),
    ]


def test_a_free_block_keeps_the_size_last_requested() -> None:
    # As in torch, where nothing clears it: a merged block shows the request of the one freed last.
    for observer in (None, lambda *_: None):
        allocator = CachingAllocator(Driver(4 * GIB), on_event=observer)
        first, second = allocator.malloc(700), allocator.malloc(900)
        allocator.free(second)
        allocator.free(first)
        (block,) = allocator.segments()[0]["blocks"]
        assert block["requested_size"] == 700


def test_segments_come_by_address() -> None:
    allocator = CachingAllocator(Driver(4 * GIB))
    for size, stream in ((30 * MIB, 5), (512, 0), (20 * MIB, 0)):
        allocator.malloc(size, stream)
    addresses = [segment["address"] for segment in allocator.segments()]
    assert len(addresses) == 3 and addresses == sorted(addresses)


def test_taking_a_snapshot_is_an_event() -> None:
    events = []
    allocator = CachingAllocator(Driver(4 * GIB), on_event=lambda *event: events.append(event))
    allocator.malloc(600)
    allocator.segments()
    assert events[-1] == (AllocatorEventKind.SNAPSHOT, 0, 1024, 0)


def test_event_kinds_are_spelled_as_in_traces() -> None:
    assert [kind.torch_name for kind in AllocatorEventKind] == [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "snapshot",
        "oom",
    ]
