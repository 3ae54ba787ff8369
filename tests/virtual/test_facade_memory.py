from __future__ import annotations

import pickle
import traceback

import pytest
import torch
from facade_support import virtual_cuda

from vramfit.gpus import find_gpu
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


@pytest.fixture
def machine():
    with virtual_cuda(count=2) as machine:
        yield machine


def test_statistics_are_those_of_the_allocator(machine):
    assert torch.cuda.memory_stats() == {} and torch.cuda.memory_allocated() == 0
    torch.cuda.init()
    allocator = machine.devices[1].allocator
    address = allocator.malloc(3 * MIB)
    assert torch.cuda.memory_allocated(1) == 3 * MIB and torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_reserved(1) == 20 * MIB
    allocator.free(address)
    assert torch.cuda.max_memory_allocated("cuda:1") == 3 * MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0
    torch.cuda.reset_accumulated_memory_stats(1)
    assert torch.cuda.memory_stats(1)["allocation.all.allocated"] == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0
    assert torch.cuda.memory_stats_as_nested_dict(1)["reserved_bytes"]["all"]["peak"] == 20 * MIB


def test_the_summary_is_formatted_by_torch(machine):
    torch.cuda.init()
    machine.devices[0].allocator.malloc(3 * MIB)
    summary = torch.cuda.memory_summary()
    assert (
        "PyTorch CUDA memory summary, device ID 0" in summary
        and "| Allocated memory      |   3072 KiB" in summary
    )


def test_free_memory_of_the_card(machine):
    free, total = torch.cuda.mem_get_info()
    assert total == find_gpu("RTX 4090").total_bytes
    assert total - free == machine.devices[0].context_bytes
    machine.devices[0].allocator.malloc(3 * MIB)
    assert torch.cuda.mem_get_info(0)[0] == free - 20 * MIB
    assert torch.cuda.mem_get_info("cuda:1") == (free, total)


def test_the_memory_fraction(machine):
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.set_per_process_memory_fraction(0.001)
    assert torch.cuda.get_per_process_memory_fraction() == 0.001
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 100\.00 MiB"):
        torch.cuda.caching_allocator_alloc(100 * MIB)
    with pytest.raises(ValueError, match="Invalid fraction"):
        torch.cuda.set_per_process_memory_fraction(1.5)


def test_raw_allocations(machine):
    side = torch.cuda.Stream(device=1)
    address = torch.cuda.caching_allocator_alloc(1000, device=1, stream=side)
    assert [s["stream"] for s in machine.devices[1].allocator.segments()] == [side.stream_id]
    torch.cuda.caching_allocator_delete(address)
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


def test_raw_allocations_go_through_the_hooks(machine):
    machine.hooks.malloc = lambda device, size, stream: 0x1000 + device
    freed = []
    machine.hooks.free = lambda device, address: freed.append((device, address))
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(10))
    assert freed == [(0, 0x1000)]


def test_settings_can_be_changed(machine):
    assert torch.cuda.get_allocator_backend() == "native"
    with pytest.warns(FutureWarning, match="_set_allocator_settings is deprecated"):
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:32")
    assert machine.config.max_split_size == 32 * MIB
    torch._C._accelerator_setAllocatorSettings("")
    with pytest.raises(RuntimeError, match="nonsense"):
        torch._C._accelerator_setAllocatorSettings("nonsense:1")
    assert machine.config.max_split_size is None


def test_settings_that_others_do_not_name_stay_and_the_backend_cannot_change(machine):
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:32")
    assert machine.config.expandable_segments and machine.config.max_split_size == 32 * MIB
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert not machine.config.expandable_segments and machine.config.max_split_size is None
    with pytest.raises(RuntimeError, match="parsed at runtime != allocator backend parsed at load time"):
        torch._C._accelerator_setAllocatorSettings("backend:cudaMallocAsync")


def test_settings_of_the_environment_may_be_set_by_the_program(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with virtual_cuda(alloc_conf=None) as machine:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.init()
        machine.devices[0].allocator.malloc(100)
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]


def test_snapshots_without_a_recorder(machine, tmp_path):
    machine.devices[0].allocator.malloc(3 * MIB)
    snapshot = torch.cuda.memory._snapshot()
    assert [segment["total_size"] for segment in snapshot["segments"]] == [20 * MIB]
    assert snapshot["device_traces"] == [[], []]
    torch.cuda.memory._dump_snapshot(str(tmp_path / "dump.pickle"))
    with (tmp_path / "dump.pickle").open("rb") as file:
        dumped = pickle.load(file)
    assert dumped == snapshot

    from torch.cuda._memory_viz import segsum, trace_plot

    assert "20.0MiB" in segsum(dumped)
    assert "<html>" in trace_plot(dumped)


def test_snapshots_of_a_recorder(machine):
    heard = []
    machine.hooks.on_record_history = heard.append
    full = {
        "segments": [{"segment_pool_id": (0, 0)}, {"segment_pool_id": (0, 9)}],
        "device_traces": [[{"action": "alloc"}], []],
    }
    machine.hooks.snapshot_provider = lambda: full
    torch.cuda.memory._record_memory_history(max_entries=5)
    assert heard[0]["enabled"] == "all" and heard[0]["max_entries"] == 5
    assert torch._C._cuda_isHistoryEnabled()
    assert torch.cuda.memory._snapshot() == full
    assert torch.cuda.memory_snapshot((0, 9)) == [full["segments"][1]]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=7)
    assert machine.history["max_entries"] == 7


def test_later_releases_may_add_arguments_to_the_history(machine):
    # As torch 2.14 calls it, and with one more.
    arguments = ("all", "all", "python", 5, False, False, False, ["oom"], False, True, "of a later release")
    torch._C._cuda_record_memory_history(*arguments)
    assert machine.history["max_entries"] == 5 and machine.history["skip_actions"] == ("oom",)
    torch._C._cuda_record_memory_history_legacy(
        True, True, 6, True, False, False, False, False, [], False, True, "x"
    )
    assert machine.history["max_entries"] == 6


def test_the_history_of_pinned_memory_alone_records_no_card(machine):
    arguments = ("all", "all", "python", 5, False, False, False, [])
    torch._C._cuda_record_memory_history(*arguments, True, False)
    assert machine.history is None and not torch._C._cuda_isHistoryEnabled()
    assert [warned.code for warned in machine.warnings] == ["no-host-history"]


def test_memory_pools(machine):
    pool = torch.cuda.MemPool()
    other = torch.cuda.MemPool()
    assert pool.id != other.id and pool.id[0] == 0 and pool.use_count() == 1
    allocator = machine.devices[0].allocator
    with torch.cuda.use_mem_pool(pool):
        inside = allocator.malloc(100)
    outside = allocator.malloc(100)
    assert [s["segment_pool_id"] for s in pool.snapshot()] == [pool.id]
    assert len(torch.cuda.memory_snapshot()) == 2
    allocator.free(inside)
    del pool
    assert len(torch.cuda.memory_snapshot()) == 1
    allocator.free(outside)


def test_pinned_memory_is_counted(machine):
    torch.cuda.init()
    handle = machine.pin(5 * MIB)
    stats = torch.cuda.host_memory_stats()
    assert stats["allocated_bytes.current"] == stats["active_bytes.current"] == 8 * MIB
    machine.unpin(handle)
    torch.cuda.memory.reset_peak_host_memory_stats()
    torch.cuda.memory.reset_accumulated_host_memory_stats()
    stats = torch.cuda.host_memory_stats()
    assert (stats["allocated_bytes.current"], stats["active_bytes.peak"]) == (8 * MIB, 0)
    torch._C._host_emptyCache()
    assert machine.pinned.reserved_bytes == 0


def test_what_is_not_followed_is_said(machine):
    torch.cuda.init()
    torch.cuda.caching_allocator_enable(False)
    assert not torch._C._cuda_cudaCachingAllocator_is_enabled()
    torch.cuda.caching_allocator_enable()
    torch._C._cuda_changeCurrentAllocator(torch._C._cuda_getAllocator())
    assert [w.code for w in machine.warnings] == ["caching-allocator-disabled", "pluggable-allocator"]


def test_observers_and_metadata(machine):
    observer = print
    torch._C._cuda_attach_out_of_memory_observer(observer)
    assert machine.hooks.oom_observers == [observer]
    torch.cuda.memory._set_memory_metadata("epoch 1")
    assert torch.cuda.memory._get_memory_metadata() == "epoch 1"


def test_a_storage_that_found_no_place_may_die_before_its_record(fit_interpreter):
    """As in a handler that clears the frames of the error one by one."""
    with VirtualGPU("1GiB"):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2 << 30, device="cuda")
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        record = next(frame.f_locals["record"] for frame in frames if frame.f_code.co_name == "adopt")
        traceback.clear_frames(caught.value.__traceback__)
        del frames, caught
        assert record() is None
        assert torch.cuda.memory_allocated() == 0
