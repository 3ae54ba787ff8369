"""Calls by which a CUDA build of torch asks the driver on a card, each made on a virtual card, for test_cuda_builds.py.

As a script it makes them one after the other, and a mark before each: it asks the dynamic linker for a library of the
call's name, which is not there. With ``LD_DEBUG=libs`` the linker's log then tells during which call the driver was
looked for. Written to stdout: the errors by the names of the calls, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from vramfit.virtual.gpu import VirtualGPU

MARK = "libvramfit-mark-{}.so"
LAST = "profilers"
"""The call that asks the driver all the same: it comes last, for a process looks for the driver once."""

CALLS: dict[str, Callable[[], object]] = {}
C: Any = torch._C


def call(function: Callable[[], object]) -> Callable[[], object]:
    """Note a function among the calls."""
    CALLS[function.__name__] = function
    return function


def numbers(*shape: int, **options: Any) -> torch.Tensor:
    """A tensor on the card."""
    return torch.randn(*shape, device="cuda", **options)


def optional(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a module where this release has it."""
    function = getattr(module, name, None)
    return None if function is None else function(*args, **kwargs)


@call
def training() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).cuda()
    for optimizer in (
        torch.optim.AdamW(model.parameters()),
        torch.optim.Adam(model.parameters(), fused=True),
    ):
        with torch.autocast("cuda"):
            loss = functional.cross_entropy(
                model(numbers(2, 3, 8, 8)), torch.zeros(2, dtype=torch.int64).cuda()
            )
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@call
def recurrent() -> None:
    nn.LSTM(4, 4, num_layers=2, dropout=0.5).cuda()(numbers(3, 2, 4))[0].sum().backward()
    optional(C, "_cudnn_clear_dropout_state")


@call
def attention() -> None:
    query = numbers(1, 2, 64, 64, dtype=torch.float16, requires_grad=True)
    functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    cuda = torch.backends.cuda
    asked = cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    assert cuda.can_use_flash_attention(asked) and cuda.can_use_efficient_attention(asked)
    cuda.can_use_cudnn_attention(asked)


@call
def random_numbers() -> None:
    torch.manual_seed(1)
    torch.cuda.manual_seed_all(2)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    with torch.random.fork_rng(device_type="cuda"):
        numbers(2).exponential_().bernoulli_()
    generator = torch.Generator("cuda").manual_seed(3)
    torch.randperm(5, device="cuda", generator=generator)
    optional(torch.cuda.default_generators[0], "philox_state", 4)
    optional(C, "_accelerator_getDefaultGenerator", 0)


@call
def graphs() -> None:
    source = numbers(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source * 2
    graph.replay()
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    kept.enable_debug_mode()
    with torch.cuda.graph(kept):
        source * 2
    kept.debug_dump(os.devnull)
    torch.cuda.make_graphed_callables(nn.Linear(4, 4).cuda(), (numbers(2, 4, requires_grad=True),))


@call
def annotated_graphs() -> None:
    try:
        from torch.cuda._graph_annotations import mark_kernels
    except ImportError:
        return
    with torch.cuda.graph(torch.cuda.CUDAGraph()), mark_kernels("part"):
        numbers(4)


@call
def streams_and_events() -> None:
    for stream in (torch.cuda.Stream(), torch.Stream("cuda"), torch.cuda.ExternalStream(1 << 20)):
        with stream:
            numbers(4).record_stream(stream)
        stream.synchronize()
    for kind in (torch.cuda.Event(enable_timing=True), torch.Event("cuda", enable_timing=True)):
        kind.record()
        kind.synchronize()
        kind.elapsed_time(kind)
    torch.accelerator.synchronize()
    torch.accelerator.current_stream()


@call
def memory() -> None:
    torch.cuda.memory._record_memory_history()
    kept = numbers(10)
    torch.cuda.memory._snapshot()
    torch.cuda.memory_summary()
    torch.cuda.mem_get_info()
    torch.cuda.memory._record_memory_history(enabled=None)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        numbers(4)
    optional(torch.cuda.memory, "_set_memory_metadata", "note")
    optional(torch.cuda.memory, "_annotate_tensor", kept, "note")
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(100))
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    torch.cuda.host_memory_stats()
    with contextlib.suppress(AttributeError), torch.cuda.memory._use_uvm():
        numbers(4)


@call
def pinned_memory() -> None:
    assert torch.randn(3).pin_memory().is_pinned() and not torch.randn(3).is_pinned()
    assert torch.tensor([1.0, 2.0], pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.randn(3).untyped_storage().pin_memory().is_pinned()
    samples = torch.utils.data.TensorDataset(torch.randn(8, 3))
    for (batch,) in torch.utils.data.DataLoader(samples, 4, pin_memory=True, num_workers=1):
        assert batch.is_pinned()
        batch.to("cuda", non_blocking=True)


@call
def sparse() -> None:
    for optimizer in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        table = nn.Embedding(10, 4, sparse=True).cuda()
        stepping = optimizer(table.parameters(), lr=0.1)
        table(torch.zeros(3, dtype=torch.int64, device="cuda")).sum().backward()
        stepping.step()
    places = torch.zeros(2, 5, dtype=torch.int64, device="cuda")
    values = numbers(5, requires_grad=True)
    matrix = torch.sparse_coo_tensor(places, values, (4, 4), check_invariants=False)
    (torch.sparse.mm(matrix, numbers(4, 3)).sum() + (matrix.detach() + matrix).to_dense().sum()).backward()
    matrix.coalesce().clone()
    rows = torch.tensor([0, 1, 2], device="cuda")
    pressed = torch.sparse_csr_tensor(rows, rows[:2], numbers(2), (2, 2), check_invariants=False)
    (pressed @ numbers(2, 3)).sum()


@call
def backends() -> None:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cuda.cufft_plan_cache[0].max_size = 10
    cuda.cufft_plan_cache.clear()
    cuda.matmul.allow_tf32 = cuda.matmul.allow_fp16_reduced_precision_reduction = True
    cuda.preferred_linalg_library("cusolver")
    cuda.preferred_blas_library("cublaslt")
    cudnn.benchmark, cudnn.benchmark_limit = True, 3
    assert cudnn.is_available() and cudnn.version() > 0
    torch.backends.cusparselt.is_available()
    tunable = torch.cuda.tunable
    tunable.enable(True)
    tunable.get_results()
    tunable.get_validators()
    tunable.set_max_tuning_duration(1)
    optional(tunable, "set_cublaslt_requested_algo_count", 3)
    optional(tunable, "wildcard_fallback_enable", True)


@call
def linear_algebra() -> None:
    matrix = numbers(4, 4)
    torch.linalg.svd(matrix)
    torch.linalg.eigh(matrix @ matrix.T)
    torch.linalg.solve(matrix, matrix)
    torch.fft.rfft2(matrix)


@call
def device_questions() -> None:
    cuda = torch.cuda
    cuda.get_device_properties(0)
    cuda.get_device_capability()
    cuda.get_arch_list()
    cuda.is_bf16_supported()
    cuda.can_device_access_peer(0, 0)
    cuda.utilization()
    cuda.temperature()
    cuda.list_gpu_processes()
    cuda.cudart().cudaMemGetInfo(0)
    cuda.current_blas_handle()
    cuda._sleep(100)
    accelerator = torch.accelerator
    accelerator.device_count()
    accelerator.set_device_index(0)
    assert accelerator.current_accelerator() == torch.device("cuda")
    with cuda.nvtx.range("part"), torch.autograd.profiler.emit_nvtx():
        cuda.nvtx.mark("moment")


@call
def files_and_copies() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensor.pt"
        torch.save({"tensor": numbers(3)}, path)
        for place in (None, "cpu", "cuda"):
            torch.load(path, map_location=place)
    storage = torch.UntypedStorage(10, device="cuda")
    storage.resize_(100)
    storage.cpu()
    torch.cuda.FloatTensor([1.0, 2.0]).type("torch.cuda.HalfTensor")
    numbers(3).sum().item()
    torch.randn(3).copy_(numbers(3))
    nn.DataParallel(nn.Linear(3, 3).cuda())(numbers(4, 3))
    nn.parallel.comm.broadcast(numbers(3), [0])


@call
def compiled() -> None:
    model = nn.Linear(8, 8).cuda()
    torch.compile(model, mode="reduce-overhead")(numbers(4, 8)).sum().backward()


@call
def kernels_of_triton() -> None:
    try:
        import triton
    except ImportError:
        return
    driver = triton.runtime.driver.active
    driver.get_current_target()
    driver.get_current_stream(driver.get_current_device())
    driver.utils.get_device_properties(0)


@call
def process_groups() -> None:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        for value in (numbers(4), numbers(2)):
            dist.all_reduce(value)
        dist.barrier()
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        torch.cuda.MemPool(backend.mem_allocator)
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda(), find_unused_parameters=True)
        for _ in range(2):
            model(numbers(2, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    torch.cuda.nccl.version()
    torch.cuda.nccl.unique_id()
    C._distributed_c10d._SymmetricMemory.has_multicast_support(C._autograd.DeviceType.CUDA, 0)


@call
def later_kinds_of_nccl() -> None:
    for kind in ("nccl2", "nccl-lazy"):
        if kind in dist.Backend.backend_list:
            dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(numbers(4))
            dist.destroy_process_group()


def refused(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Note a function among the calls, which is refused by this name."""

    def note(function: Callable[[], object]) -> Callable[[], object]:
        REFUSED[function.__name__] = name
        return call(function)

    return note


REFUSED: dict[str, str] = {}
"""What the error of a call that is refused says."""


@refused("torch.cuda.nccl")
def nccl_itself() -> None:
    torch.cuda.nccl.all_reduce([numbers(3)])


@refused("symmetric memory")
def symmetric_memory() -> None:
    from torch.distributed import _symmetric_memory

    _symmetric_memory.empty(16, device="cuda")


@refused("torch.cuda.gds")
def direct_storage() -> None:
    torch.cuda.gds.gds_register_buffer(numbers(3).untyped_storage())


@refused("reen")  # "a green context", "GreenContext", "Green Context"
def green_contexts() -> None:
    from torch.cuda.green_contexts import GreenContext

    GreenContext.create(num_sms=8, device_id=0)


@refused("jiterator")
def jiterator() -> None:
    torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(numbers(3))


@refused("compiles CUDA code")
def compiled_kernels() -> None:
    torch.cuda._compile_kernel('extern "C" __global__ void f(float* x) {}', "f")


@refused("a checkpoint of a memory pool")
def checkpoints_of_pools() -> None:
    C._cuda_getCheckpointState(0, (0, 1))


@refused("aten::empty")
def a_real_tensor() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        torch.empty(3, device="cuda")


def profilers() -> None:
    """Profile: when a profile ends, Kineto counts the machine's cards, which cannot be kept from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True
        ) as profiled:
            numbers(3) + 1
        profiled.key_averages()
        with torch.autograd.profiler.profile(use_device="cuda"):
            numbers(3) + 1
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()


def mark(name: str) -> None:
    """Leave a mark in the linker's log."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(MARK.format(name))


def main() -> None:
    """Make all calls on one virtual card."""
    errors: dict[str, str] = {}
    mark("entering")
    with VirtualGPU("RTX 4090", alloc_conf=""):
        for name, function in CALLS.items():
            mark(name)
            try:
                function()
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
        mark(LAST)
        profilers()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
