from __future__ import annotations

import threading

import pytest

from vramfit.allocator import AllocatorConfig
from vramfit.errors import ConfigError, UsageError
from vramfit.gpus import find_gpu
from vramfit.virtual import simulated_streams as stream_ids
from vramfit.virtual.machine import InvalidDevice, Machine, visible_devices
from vramfit.virtual.pinned import PinnedMemory

MIB = 1 << 20
CARDS = ("GPU-11aa", "GPU-11bb", "GPU-22cc")


def machine(count: int = 1, **options) -> Machine:
    return Machine([find_gpu("A100 40GB")] * count, **({"visible": None, "alloc_conf": ""} | options))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 2", (1, 2)),
        ("0,-1,1", (0,)),
        ("0,7,1", (0,)),
        ("1,1", ()),
        ("none", ()),
        ("GPU-22", (2,)),
        ("GPU-11", ()),
        ("GPU-11b,GPU-22cc", (1, 2)),
        ("GPU-nothere,0", ()),
    ],
)
def test_visible_devices_follow_the_driver(text, expected):
    assert visible_devices(text, CARDS) == expected


def test_the_environment_is_read_when_devices_are_first_asked_for(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    box = machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [device.physical_index for device in box.devices] == [1]
    assert box.device().index == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(box.devices) == 1


def test_a_list_that_names_no_device_is_warned_about():
    box = machine(1, visible="3")
    assert box.devices == ()
    assert box.warnings[0].code == "no-visible-device"
    assert machine(1, visible="").devices == ()


def test_looking_does_not_settle_what_is_visible(monkeypatch):
    box = machine(3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(box.devices_now()) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # a program does, at its top
    assert [device.physical_index for device in box.devices] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(box.devices) == 1


def test_uuids_name_devices():
    box = machine(3)
    chosen = machine(3, visible=box.uuids[2][:20])
    assert [device.physical_index for device in chosen.devices] == [2]
    assert len(set(box.uuids)) == 3


def test_settings_come_from_the_environment_until_an_allocator_is_used(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    box = machine(1, alloc_conf=None)
    assert box.config.max_split_size == 64 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert box.devices[0].allocator.config.max_split_size == 128 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert box.config.max_split_size == 128 * MIB


def test_settings_can_change_while_the_program_runs():
    box = machine(1)
    allocator = box.devices[0].allocator
    box.set_config(AllocatorConfig.parse("garbage_collection_threshold:0.5"))
    assert allocator.config.garbage_collection_threshold == 0.5


def test_unreadable_settings():
    with pytest.raises(ConfigError):
        machine(1, alloc_conf="max_split_size_mb:x").config  # noqa: B018


def test_a_machine_without_cards_is_refused():
    with pytest.raises(UsageError, match="at least one GPU"):
        Machine([])


def test_the_context_is_outside_the_allocator():
    box = machine(1, context_bytes=300 * MIB)
    device = box.devices[0]
    assert device.memory_info() == (device.spec.total_bytes - 300 * MIB, device.spec.total_bytes)
    device.allocator.malloc(5 * MIB)
    assert device.memory_info()[0] == device.spec.total_bytes - 320 * MIB


def test_an_unmeasured_context_is_estimated_from_the_multiprocessors():
    small, large = find_gpu("T4"), find_gpu("H100 SXM")
    assert 64 * MIB <= small.typical_context_bytes < large.typical_context_bytes < 1024 * MIB


def test_current_device_and_stream_belong_to_the_thread():
    box = machine(2)
    box.current_device = 1
    box.set_stream(35)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((box.current_device, box.current_stream(1))))
    thread.start()
    thread.join()
    assert seen == [(0, 0)]
    assert (box.current_device, box.current_stream(), box.current_stream(0)) == (1, 35, 0)


def test_devices_that_do_not_exist():
    box = machine(2)
    with pytest.raises(InvalidDevice):
        box.device(2)
    with pytest.raises(InvalidDevice):
        box.current_device = 2
    assert box.device(-1).index == 0


def test_streams_are_numbered_as_in_torch_and_come_round_again():
    box = machine(1)
    first = [box.new_stream() for _ in range(33)]
    assert first[:3] == [3, 35, 67]
    assert first[32] == first[0] and len(set(first)) == 32
    assert stream_ids.priority_of(box.new_stream(priority=-1)) == -1
    assert stream_ids.priority_of(box.new_stream(priority=-100)) == stream_ids.HIGHEST_PRIORITY
    assert stream_ids.priority_of(box.new_stream(priority=100)) == 0


@pytest.mark.parametrize("device", [0, 3])
def test_a_handle_names_its_stream(device):
    table = stream_ids.StreamTable()
    ids = [table.new(device, priority) for priority in (0, -1, -2, -3) for _ in range(32)]
    handles = [stream_ids.handle_of(stream, device) for stream in ids]
    assert len(set(handles)) == len(ids)
    assert [stream_ids.stream_of(handle, device) for handle in handles] == ids
    assert stream_ids.stream_of(0, device) == 0
    assert stream_ids.stream_of(0x1234560, device) == 0x1234560
    assert (
        stream_ids.is_external(0x1234560) and not stream_ids.is_external(3) and not stream_ids.is_external(0)
    )


def test_waiting_completes_frees_of_other_streams():
    box = machine(1)
    heard = []
    box.hooks.on_synchronize = heard.append
    allocator = box.devices[0].allocator
    address = allocator.malloc(MIB)
    allocator.record_stream(address, 35)
    allocator.free(address)
    assert allocator.active_bytes == MIB
    box.synchronize()
    assert allocator.active_bytes == 0 and heard == [0]


def test_events_carry_the_device():
    box = machine(2)
    heard = []
    box.on_event = lambda device, kind, *rest: heard.append((device, kind.torch_name))
    box.devices[1].allocator.malloc(100)
    assert (1, "segment_alloc") in heard and {device for device, _ in heard} == {1}


def test_warnings_are_counted_by_code_and_place():
    box = machine(1)
    for _ in range(3):
        box.warn("guess", "a value was guessed", location="train.py:3")
    box.warn("guess", "a value was guessed", location="train.py:9")
    assert [(w.location, w.count) for w in box.warnings] == [("train.py:3", 3), ("train.py:9", 1)]


def test_memory_running_out_is_told_to_the_observers():
    box = machine(1)
    heard = []
    box.hooks.oom_observers.append(lambda *figures: heard.append(figures))
    box.notify_oom(0, 10, 20, 30)
    assert heard == [(0, 10, 20, 30)]


def test_pinned_memory_is_rounded_and_cached():
    box = machine(1)
    first = box.pin(5 * MIB)
    assert box.pinned.reserved_bytes == 8 * MIB
    box.unpin(first)
    assert box.pinned.reserved_bytes == 8 * MIB
    assert box.pin(7 * MIB) == first
    box.pin(3 * MIB)
    assert box.pinned.reserved_bytes == 12 * MIB
    assert box.pin(0) == 0
    box.unpin(0)
    assert box.pinned.stats()["active_bytes"]["current"] == 12 * MIB


def test_pinned_memory_goes_back_when_the_cache_is_emptied():
    memory = PinnedMemory()
    kept, gone = memory.allocate(1000), memory.allocate(4096)
    memory.free(gone)
    memory.empty_cache()
    assert memory.reserved_bytes == 1024
    stats = memory.stats()
    assert stats["num_host_alloc"] == 2 and stats["num_host_free"] == 1
    assert stats["allocated_bytes"] == {"current": 1024, "peak": 5120, "allocated": 5120, "freed": 4096}
    assert stats["active_requests"]["current"] == 1
    memory.reset_peaks()
    memory.reset_accumulated()
    assert memory.stats()["allocated_bytes"] == {"current": 1024, "peak": 1024, "allocated": 0, "freed": 0}
    memory.free(kept)


def test_pinned_settings_limit_rounding_and_caching():
    box = machine(1, alloc_conf="pinned_max_cached_size_mb:4", torch_version=(2, 13))
    large = box.pin(5 * MIB)
    assert box.pinned.reserved_bytes == 5 * MIB
    box.unpin(large)
    assert box.pinned.reserved_bytes == 0
