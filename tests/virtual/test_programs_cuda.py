"""``torch.cuda`` in programs: memory figures, streams, threads, several cards, settings, and running out."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import ConfigError, UsageError
from vramfit.torch_internals.releases import at_least
from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
GIB = 1 << 30


def block(mib: float, device: int | str = "cuda") -> torch.Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)


# -- figures -------------------------------------------------------------------------------------------------------


def test_memory_figures_are_exact_without_a_call_before(gpu: VirtualGPU) -> None:
    x = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == 4096, "the first question about memory may come at any time"
    assert torch.cuda.is_initialized()
    assert torch.cuda.memory_reserved() == 2 * MIB
    y = block(1.5)
    assert torch.cuda.memory_allocated() == 4096 + 1.5 * MIB
    assert torch.cuda.memory_reserved() == 22 * MIB, "1 to 10 MiB come from segments of 20 MiB"
    del y
    assert torch.cuda.memory_allocated() == 4096, "gone at once, not with the next tensor"
    assert torch.cuda.max_memory_allocated() == 4096 + 1.5 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 4096
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * MIB
    assert x.data_ptr() % 512 == 0


def test_a_freed_tensor_is_seen_by_empty_cache_and_mem_get_info(gpu: VirtualGPU) -> None:
    x = block(100)
    free, total = torch.cuda.mem_get_info()
    assert total == gpu.spec.total_bytes
    assert free == total - 256 * MIB - 100 * MIB
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == total - 256 * MIB
    assert torch.cuda.memory_reserved() == 0


def test_statistics_and_summaries(gpu: VirtualGPU) -> None:
    x = block(3)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB
    assert stats["requested_bytes.all.current"] == 3 * MIB
    assert stats["segment.large_pool.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB
    assert "3072 KiB" in torch.cuda.memory_summary()
    assert "MiB" in torch.cuda.memory_summary(abbreviated=True) or "KiB" in torch.cuda.memory_summary()
    assert x.numel() == 3 * MIB


def test_requests_of_every_size_are_rounded_as_on_a_card(gpu: VirtualGPU) -> None:
    for size, rounded in ((1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)):
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == rounded, size
        del x
    empty = torch.empty(0, device="cuda")
    assert torch.cuda.memory_allocated() == 0 and empty.data_ptr() == 0


def test_views_share_and_storages_die_with_their_last_view(gpu: VirtualGPU) -> None:
    base = block(4)
    part = base[1024:2048]
    assert part.data_ptr() == base.data_ptr() + 1024
    del base
    assert torch.cuda.memory_allocated() == 4 * MIB
    copy = part.clone()
    del part
    assert torch.cuda.memory_allocated() == 1024
    copy.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    copy.untyped_storage().resize_(2 * MIB)
    assert torch.cuda.memory_allocated() == 2 * MIB


def test_snapshots_can_be_recorded_and_dumped(gpu: VirtualGPU, tmp_path: Path) -> None:
    early = block(1)
    torch.cuda.memory._record_memory_history()
    late = block(2)
    snapshot = torch.cuda.memory._snapshot()
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions.count("alloc") == 1 and "segment_alloc" in actions
    used = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sorted(b["size"] for b in used) == [MIB, 2 * MIB]
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    from vramfit.trace import load_snapshot

    dumped = [entry["action"] for entry in load_snapshot(path)["device_traces"][0]]
    assert dumped == [*actions, "snapshot"]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert early.numel() + late.numel() == 3 * MIB


def test_a_recording_holds_no_tensor_that_died_before_it(gpu: VirtualGPU) -> None:
    early = block(1)
    del early
    torch.cuda.memory._record_memory_history()
    block(2)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    returned = [entry["size"] for entry in entries if entry["action"] == "free_requested"]
    assert returned == [2 * MIB]


def test_a_snapshot_tells_the_allocators_settings() -> None:
    with VirtualGPU("RTX 4090", alloc_conf="expandable_segments:True") as gpu:
        kept = block(2)
        snapshot = torch.cuda.memory._snapshot()
        assert snapshot["allocator_settings"]["expandable_segments"] is True
        assert snapshot["segments"][0]["is_expandable"] and kept.is_cuda and gpu.run.oom is None


def test_a_dropout_makes_its_mask_first(gpu: VirtualGPU) -> None:
    x = torch.empty(1 << 20, device="cuda", requires_grad=True)
    torch.cuda.memory._record_memory_history()
    kept = torch.nn.functional.dropout(x, 0.1)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert [e["size"] for e in entries if e["action"] == "alloc"] == [MIB, kept.nbytes]


def test_a_block_that_may_be_done_without_is_a_plain_figure(gpu: VirtualGPU) -> None:
    layer = torch.nn.Conv2d(16, 16, 3, padding=1).cuda()
    torch.backends.cudnn.benchmark = True
    try:
        layer(torch.empty(2, 16, 64, 64, device="cuda"))
    finally:
        torch.backends.cudnn.benchmark = False
    blocks = [b for s in torch.cuda.memory._snapshot()["segments"] for b in s["blocks"]]
    assert blocks and all(type(b["requested_size"]) is int for b in blocks if "requested_size" in b)


def test_properties_are_the_cards(gpu: VirtualGPU) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
    assert torch.cuda.get_device_capability() == (8, 9)
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory == gpu.spec.total_bytes and properties.multi_processor_count == 128
    assert torch.cuda.is_bf16_supported() and torch.version.cuda is not None
    x = torch.ones(2, device="cuda")
    assert x.is_cuda and x.get_device() == 0 and x.type() == "torch.cuda.FloatTensor"
    assert x.device == torch.device("cuda", 0) and torch.cuda.FloatTensor([1, 2]).tolist() == [1.0, 2.0]
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    assert torch.backends.cudnn.is_available()


# -- random state --------------------------------------------------------------------------------------------------


def test_a_seed_repeats_the_cards_random_numbers(gpu: VirtualGPU) -> None:
    def draw() -> list[object]:
        x = torch.ones(6, device="cuda")
        return [
            torch.randn(3, device="cuda").tolist(),
            torch.nn.functional.dropout(x, 0.5).tolist(),
            torch.randperm(6, device="cuda").tolist(),
            torch.empty(2, device="cuda").uniform_(3, 4).tolist(),
            torch.multinomial(x, 2).tolist(),
            nn.Linear(2, 2).weight.tolist(),
        ]

    torch.manual_seed(5)
    first = draw()
    assert draw() != first
    torch.manual_seed(5)
    assert draw() == first
    torch.cuda.manual_seed_all(9)
    state = torch.cuda.get_rng_state()
    one = torch.rand(3, device="cuda").tolist()
    assert not torch.equal(state, torch.cuda.get_rng_state())
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").tolist() == one
    assert torch.cuda.initial_seed() == 9


def test_generators_of_the_card_have_their_own_sequence(gpu: VirtualGPU) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert generator.device == torch.device("cuda", 0)
    default = torch.cuda.get_rng_state()
    first = torch.randn(2, device="cuda", generator=generator).tolist()
    second = torch.randint(0, 100, (2,), device="cuda", generator=generator).tolist()
    torch.empty(3, device="cuda").normal_(generator=generator)
    assert torch.equal(torch.cuda.get_rng_state(), default)
    generator.manual_seed(1)
    assert torch.randn(2, device="cuda", generator=generator).tolist() == first
    assert torch.randint(0, 100, (2,), device="cuda", generator=generator).tolist() == second
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), default)


# -- streams and threads -------------------------------------------------------------------------------------------


def test_streams_have_memory_of_their_own(gpu: VirtualGPU) -> None:
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream() != side
    x = block(1)
    address = x.data_ptr()
    del x
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        y = block(1)
        assert y.data_ptr() != address, "a free block of one stream does not serve another"
    z = block(1)
    assert z.data_ptr() == address


def test_record_stream_delays_the_reuse_of_a_block(gpu: VirtualGPU) -> None:
    side = torch.cuda.Stream()
    x = block(4)
    address = x.data_ptr()
    x.record_stream(side)
    del x
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 4 * MIB
    torch.cuda.synchronize()
    y = block(4)
    assert y.data_ptr() == address
    kinds = [EventKind(int(k)) for k in gpu.trace.kind]
    assert kinds.index(EventKind.FREE_REQUESTED) < kinds.index(EventKind.FREE_COMPLETED)


def test_events_measure_simulated_time(gpu: VirtualGPU) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.randn(4096, 4096, device="cuda")
    start.record()
    for _ in range(10):
        x = x @ x
    end.record()
    end.synchronize()
    assert end.query()
    flops = 10 * 2 * 4096**3
    floor = 1e3 * flops / gpu.spec.peak_flops["float32"]
    assert floor * 0.9 <= start.elapsed_time(end) <= floor * 5
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(end)
    stream.synchronize()


def test_threads_of_the_program_see_the_card(gpu: VirtualGPU) -> None:
    found: list[object] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            x = torch.ones(3, device="cuda", requires_grad=True)
            (x * 2).sum().backward()
            assert x.grad is not None
            found.append((x.is_cuda, x.grad.tolist()))

    worker = Worker()
    worker.start()
    worker.join()
    assert found == [(True, [2.0, 2.0, 2.0])]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda i: (torch.ones(2, device="cuda") * i).sum().item(), range(4)))
    assert results == [0.0, 2.0, 4.0, 6.0]


def test_graphs_capture_and_replay(gpu: VirtualGPU) -> None:
    x = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    held = torch.cuda.memory_allocated()
    graph.replay()
    assert torch.cuda.memory_allocated() == held and y.shape == (1024,)


# -- several cards -------------------------------------------------------------------------------------------------


def test_two_cards_have_separate_memory() -> None:
    with VirtualGPU("RTX 4090", gpus=2, alloc_conf="", context_bytes=0) as gpu:
        assert torch.cuda.device_count() == 2
        first, second = block(2, "cuda:0"), block(3, "cuda:1")
        assert (first.get_device(), second.get_device()) == (0, 1)
        assert torch.cuda.memory_allocated(0) == 2 * MIB and torch.cuda.memory_allocated(1) == 3 * MIB
        moved = first.to("cuda:1")
        assert torch.cuda.memory_allocated(1) == 5 * MIB and moved.device.index == 1
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            here = block(1)
            assert here.device.index == 1
        assert torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match=r"same device|two (different )?devices"):
            first + second[: first.numel()]
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            block(1, "cuda:2")
        small = torch.tensor([1.0, 2.0], device="cuda:0")
        assert small.to("cuda:1").tolist() == [1.0, 2.0]
        target = torch.zeros(2, device="cuda:1")
        target.copy_(small)
        assert target.tolist() == [1.0, 2.0]
        left = nn.Linear(8, 8).to("cuda:0")
        right = nn.Linear(8, 8).to("cuda:1")
        right(left(torch.randn(2, 8, device="cuda:0")).to("cuda:1")).sum().backward()
        assert left.weight.grad is not None and left.weight.grad.device.index == 0
        assert right.weight.grad is not None and right.weight.grad.device.index == 1
    assert [device.index for device in gpu.run.devices] == [0, 1]
    assert gpu.run.devices[1].peak_allocated_bytes >= 6 * MIB


def test_visible_devices_are_counted_and_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with VirtualGPU("RTX 4090", gpus=2):
        assert torch.cuda.device_count() == 1
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with VirtualGPU("RTX 4090"):
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


@pytest.mark.parametrize("count", [0, 9, -1])
def test_a_wrong_number_of_cards_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="1 to 8"):
        VirtualGPU("RTX 4090", gpus=count)


# -- settings ------------------------------------------------------------------------------------------------------


def fragmented() -> None:
    """Leave holes of 20 MiB, and ask for one that fits none of them."""
    kept = [block(20) for _ in range(20)]
    del kept[::2]
    kept.append(block(40))


def test_settings_from_the_argument_change_what_is_reserved() -> None:
    reserved = {}
    for conf in ("", "expandable_segments:True"):
        with VirtualGPU("RTX 4090", alloc_conf=conf):
            fragmented()
            reserved[conf] = torch.cuda.max_memory_reserved() // MIB
    assert reserved == {"": 440, "expandable_segments:True": 440}


@pytest.mark.skipif(not at_least(2, 11), reason="large_segment_size_mb is a setting since 2.11")
def test_settings_from_the_environment_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:1,large_segment_size_mb:64")
    with VirtualGPU("RTX 4090") as gpu:
        x = block(2)
        assert torch.cuda.memory_reserved() in (20 * MIB, 64 * MIB)
        assert "large_segment_size_mb:64" in str(gpu.trace.meta["alloc_conf"])
        assert x.numel() == 2 * MIB
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with VirtualGPU("RTX 4090"):
        x = block(2)
        assert torch.cuda.memory_reserved() == 20 * MIB
        assert torch.cuda.memory._snapshot()["segments"][0]["is_expandable"]


def test_settings_that_cannot_be_read_are_refused_before_the_program_runs() -> None:
    with pytest.raises(ConfigError, match="max_split"):
        VirtualGPU("RTX 4090", alloc_conf="max_split:1")


# -- running out ---------------------------------------------------------------------------------------------------


def test_running_out_raises_the_cards_error_and_the_program_goes_on(gpu: VirtualGPU) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    text = str(caught.value)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 100.00 GiB. GPU 0 has a total capacity of 23.64 GiB"
    )
    assert "See documentation for Memory Management" in text
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    held: list[torch.Tensor] = []
    with pytest.raises(torch.cuda.OutOfMemoryError):
        while True:
            held.append(block(1024))
    assert len(held) == 23, "23.64 GiB less the context hold 23 blocks of 1 GiB"
    assert torch.cuda.memory_stats()["num_ooms"] == 2
    oom = gpu.run.oom
    assert oom is not None and oom.handled and oom.requested_bytes == GIB
    assert oom.user_line is not None and oom.user_line.filename == __file__
    held.clear()
    assert torch.ones(2, device="cuda").sum().item() == 2.0


def test_a_batch_size_finder_finds_the_largest(gpu: VirtualGPU) -> None:
    batch = 1
    fits = 0
    while True:
        try:
            x = block(1024 * batch)
            fits = batch
            del x
            batch *= 2
        except RuntimeError as error:
            assert "out of memory" in str(error)
            gc.collect()
            torch.cuda.empty_cache()
            break
    assert fits == 16


def test_cached_blocks_are_released_before_running_out(gpu: VirtualGPU) -> None:
    small = [block(1024) for _ in range(20)]
    small.clear()
    large = block(20 * 1024)
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
    assert torch.cuda.memory_reserved() == large.numel()
    assert gpu.run.oom is None


def test_a_memory_fraction_is_a_limit(gpu: VirtualGPU) -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    x = block(8 * 1024)
    with pytest.raises(torch.OutOfMemoryError, match=r"allowed"):
        block(8 * 1024)
    torch.cuda.set_per_process_memory_fraction(1.0)
    y = block(8 * 1024)
    assert x.numel() == y.numel()


def test_an_error_that_ends_the_block_is_not_handled() -> None:
    gpu = VirtualGPU("8GiB")
    with pytest.raises(torch.OutOfMemoryError), gpu:
        block(9 * 1024)
    assert gpu.run.oom is not None and not gpu.run.oom.handled
    assert gpu.run.exit_code == 1 and gpu.run.error is not None and "OutOfMemoryError" in gpu.run.error


def test_the_package_offers_the_context() -> None:
    with vramfit.VirtualGPU("24GiB") as gpu:
        x = torch.zeros(256, 1024, device="cuda")
    assert gpu.peak_allocated_bytes == MIB and gpu.peak_reserved_bytes == 2 * MIB
    assert len(gpu.trace) > 0 and x.shape == (256, 1024)
    assert gpu.run.devices[0].total_bytes == 24 * GIB
