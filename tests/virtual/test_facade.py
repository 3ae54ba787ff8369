"""Devices, initialisation, and the promise that nothing of the facade is left behind."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed
from facade_support import virtual_cuda

from vramfit.gpus import catalogue, find_gpu
from vramfit.torch_internals.releases import at_least
from vramfit.virtual import torch_cuda
from vramfit.virtual.torch_cuda.properties import release_for

# The fingerprint covers these modules with all their children, and these classes.
WATCHED = ("torch._C", "torch.cuda", "torch.backends", "torch.version", "torch.random", "torch.accelerator")
CLASSES = (torch.Tensor, type(torch.backends.cudnn), torch.backends.cuda.cuFFTPlanCache, torch.cuda.graph)


def fingerprint() -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for path, module in list(sys.modules.items()):
        if path == "torch" or path.startswith(tuple(WATCHED)):
            found.update({(path, name): value for name, value in vars(module).items()})
    for cls in CLASSES:
        found.update({(cls.__qualname__, name): value for name, value in vars(cls).items()})
    found["torch.backends.cudnn", "m"] = torch.backends.cudnn.m
    found.update({("cudnn.m", name): value for name, value in vars(torch.backends.cudnn.m).items()})
    return found


def use_everything() -> None:
    torch.manual_seed(1)
    torch.cuda.init()
    torch.cuda.set_device(0)
    torch.cuda.manual_seed(2)
    torch.cuda.Stream(), torch.cuda.Event(), torch.Stream(), torch.Generator("cuda")
    torch.cuda.get_device_properties(0), torch.cuda.memory_stats(), torch.cuda.memory_summary()
    torch.cuda.is_bf16_supported(), torch.backends.cudnn.version()
    torch.accelerator.current_accelerator(), torch.get_device_module()
    torch.backends.cuda.cufft_plan_cache.max_size = 7
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pass
    with torch.random.fork_rng():
        torch.cuda.seed_all()


def test_undo_leaves_torch_as_it_was():
    importlib.import_module("torch.cuda.comm")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.cuda._graph_node_callbacks")  # since 2.15 a graph imports it
    before = fingerprint()
    with virtual_cuda():
        assert len({key for key, value in fingerprint().items() if before.get(key) is not value}) > 150
        use_everything()
    after = fingerprint()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert not torch.cuda.is_initialized()


def test_it_can_be_installed_again():
    for gpu in ("RTX 4090", "H100 SXM"):
        with virtual_cuda(gpu):
            assert torch.cuda.get_device_name() == find_gpu(gpu).vendor_name
    with pytest.raises(RuntimeError, match="is gone"):
        torch_cuda.installed_machine()


def test_modules_that_imported_names_before_see_the_facade():
    library = ModuleType("a_library_of_the_test")
    library.Stream, library.Generator = torch.cuda.Stream, torch.Generator
    before = dict(vars(library))
    sys.modules[library.__name__] = library
    try:
        with virtual_cuda():
            assert library.Stream is torch.cuda.Stream is not before["Stream"]
            assert library.Stream(device=0).device == torch.device("cuda:0")
            assert library.Generator(device="cuda").device.type == "cuda"
        assert vars(library) == before
    finally:
        del sys.modules[library.__name__]


def test_a_program_finds_its_card():
    with virtual_cuda("RTX 4090"):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert not torch.cuda.is_initialized()
        properties = torch.cuda.get_device_properties("cuda")
        assert torch.cuda.is_initialized()
        spec = find_gpu("RTX 4090")
        assert properties.name == "NVIDIA GeForce RTX 4090" == torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() == (8, 9) == (properties.major, properties.minor)
        assert properties.total_memory == spec.total_bytes
        assert properties.multi_processor_count == 128 and properties.warp_size == 32
        assert properties.L2_cache_size == spec.l2_bytes
        assert properties.max_threads_per_multi_processor == 1536
        assert len(properties.uuid.bytes) == 16
        assert repr(properties).startswith(
            "_CudaDeviceProperties(name='NVIDIA GeForce RTX 4090', major=8, minor=9, total_memory="
        )
        assert f"uuid={properties.uuid}" in repr(properties) and "L2_cache_size=72MB)" in repr(properties)
        assert "sm_80" in torch.cuda.get_arch_list()
        assert torch.backends.cuda.is_built()
        assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported()


def test_a_card_of_every_capability_can_be_used(recwarn):
    for spec in {spec.compute_capability: spec for spec in catalogue()}.values():
        with virtual_cuda(spec.name):
            torch.cuda.init()
            properties = torch.cuda.get_device_properties()
            assert (properties.name, properties.total_memory) == (spec.vendor_name, spec.total_bytes)
            assert torch.backends.cudnn.version() > 90000
    # torch warns about cards that its build has no code for; the build that is shown serves them all, but 2.10 wants
    # code for just the capability of a GB10.
    told = [str(warning.message).split()[:4] for warning in recwarn]
    assert told == ([] if at_least(2, 11) else [["Found", "GPU0", "NVIDIA", "GB10"]])


def test_an_older_card_is_served_by_an_older_build():
    with virtual_cuda("V100 16GB"):
        assert torch.version.cuda == "12.6"
        assert "sm_70" in torch.cuda.get_arch_list()
        assert torch.backends.cudnn.version() == 91002
        assert torch.cuda.is_bf16_supported(including_emulation=False) is False


def test_releases():
    assert release_for((2, 11), [(9, 0)]).cudnn == 91900
    assert release_for((2, 12), [(9, 0)]) == release_for((2, 13), [(9, 0)])
    assert release_for((2, 15), [(9, 0)]) == release_for((2, 99), [(9, 0)])
    assert 87 in release_for((2, 13), [(8, 7)]).architectures
    assert 87 not in release_for((2, 13), [(8, 6)]).architectures


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_visible_device(visible):
    with virtual_cuda(visible=visible):
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            torch.cuda.init()


def test_visible_devices_are_renumbered():
    with virtual_cuda(count=3, visible="2,0") as machine:
        assert torch.cuda.device_count() == 2
        assert [device.physical_index for device in machine.devices] == [2, 0]
        assert torch.cuda.get_device_properties(0).pci_bus_id > torch.cuda.get_device_properties(1).pci_bus_id


def test_the_current_device():
    with virtual_cuda(count=2):
        torch.cuda.set_device("cuda:1")
        assert torch.cuda.current_device() == 1
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            with torch.cuda.device(torch.device("cuda:1")):
                assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 1
        with torch.cuda.device(-1):
            assert torch.cuda.current_device() == 1
        assert torch.accelerator.current_device_index() == 1
        torch.accelerator.set_device_index(0)
        assert torch.cuda.current_device() == 0


def test_a_device_that_does_not_exist():
    with virtual_cuda():
        for use in (lambda: torch.cuda.set_device(5), lambda: torch.cuda.synchronize(1)):
            with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal") as caught:
                use()
            assert caught.value.error_code == 101
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_properties(1)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.Generator(device="cuda:1")


def test_peer_access():
    with virtual_cuda("A100 80GB", count=2):
        assert torch.cuda.can_device_access_peer(0, 1) and not torch.cuda.can_device_access_peer(0, 0)
    with virtual_cuda("RTX 4090", count=2):
        assert not torch.cuda.can_device_access_peer(0, 1)


def test_lazy_calls_wait_for_initialisation():
    with virtual_cuda():
        torch.cuda.manual_seed_all(123)
        assert not torch.cuda.is_initialized()
        assert torch.cuda.initial_seed() == 123


def _bad_fork(queue) -> None:
    queue.put((torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()))


@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_must_not_use_cuda():
    context = multiprocessing.get_context("fork")
    with virtual_cuda():
        torch.cuda.init()
        queue = context.SimpleQueue()
        child = context.Process(target=_bad_fork, args=(queue,))
        child.start()
        child.join()
        assert queue.get() == (True, False)
        assert not torch.cuda._is_in_bad_fork()


def test_sensors_and_small_answers():
    with virtual_cuda() as machine:
        assert torch.cuda.temperature() == 55 and torch.cuda.utilization() == 100
        assert torch.cuda.power_draw("cuda:0") > 0
        assert torch.cuda.clock_rate() == 2520
        assert torch.cuda.device_memory_used() == machine.devices[0].context_bytes
        assert torch.cuda.list_gpu_processes().startswith("GPU:0\nprocess")
        assert torch.cuda.current_blas_handle() != torch._C._cuda_getCurrentSolverHandle()
        torch.cuda.ipc_collect()
        before = machine.clock_us
        torch.cuda._sleep(2_520_000)
        assert machine.clock_us - before == pytest.approx(1000)
        torch.cuda.set_sync_debug_mode("warn")
        assert torch.cuda.get_sync_debug_mode() == 1
        torch.cuda.tunable.enable(True)
        assert torch.cuda.tunable.is_enabled()
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        with pytest.raises(torch.cuda.CudaError, match="invalid argument"):
            torch.cuda.check_error(torch.cuda.cudart().cudaError(1))


def test_nvtx_is_told_to_the_machine():
    with virtual_cuda() as machine:
        heard = []
        machine.hooks.on_nvtx = lambda what, name: heard.append((what, name))
        assert torch.cuda.nvtx.range_push("step") == 0
        torch.cuda.nvtx.mark("here")
        assert torch.cuda.nvtx.range_pop() == 0
        assert torch.cuda.nvtx.range_pop() < 0
        with torch.cuda.nvtx.range("epoch {}", 3):
            pass
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("apart"))
    pushes = [("push", "step"), ("mark", "here"), ("pop", ""), ("push", "epoch 3"), ("pop", "")]
    assert heard == [*pushes, ("start", "apart"), ("end", "")]


def test_the_accelerator_is_cuda():
    with virtual_cuda(count=2):
        assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.get_device_module() is torch.cuda is torch.get_device_module("cuda")
        torch.accelerator.synchronize()
        assert torch.accelerator.memory_allocated() == 0
        stream = torch.cuda.Stream(device=1)
        torch.accelerator.set_stream(stream)
        assert torch.cuda.current_stream() == stream
        assert torch.accelerator.current_stream().stream_id == stream.stream_id
    assert torch.get_device_module("cpu") is torch.cpu


def test_the_profiler_records_the_cpu_side(capfd):
    from torch.profiler import ProfilerActivity, profile

    with virtual_cuda() as machine:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
            torch.ones(2) + 1
        with torch.autograd.profiler.profile(use_device="cuda", use_kineto=True):
            torch.ones(2) + 1
        with torch.autograd.profiler.emit_nvtx():
            torch.ones(2) + 1
        assert "aten::add" in {event.key for event in recorded.key_averages()}
        assert [warned.code for warned in machine.warnings] == ["profiler-without-kernels"]
    assert "Failed to record" not in capfd.readouterr().err
