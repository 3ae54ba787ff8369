"""Distributed programs that run for real on CPU tensors with gloo, and unchanged on a virtual rank.

As a script, ``gloo_programs.py FOLDER WORLD[:NAME,...]...``, it starts worlds of real processes, each of which meters
what it holds, and the virtual ranks of the same worlds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vramfit.analysis import timeline
from vramfit.trace import Category, MemoryTrace

Live = Callable[[], int]
Program = Callable[[DeviceMesh, Live], list[int]]

_LIBRARIES: list[Any] = []
"""Keeps kernels of a real rank's process."""
ON_HOST = {"ddp_views": 512}
"""Bytes that a program holds on the host beside a card, and a run on the CPU in the same place: which parameters were
used, where DDP is given a static graph (reducer.cpp: ``local_used_map_``)."""


SHARED_OUT = ("COMMUNICATION_BUFFERS", "UNSHARDED_PARAMETERS", "PREFETCH")


class SharedOut:
    """What a rank holds at most for communication, of gathered parameters and of those gathered ahead, in bytes.

    Args:
        trace: what happened so far.
        device: its card.
    """

    def __init__(self, trace: Callable[[], MemoryTrace], device: int) -> None:
        self._trace = trace
        self._device = device
        self._start = 0
        self.most: dict[str, list[int]] = {}

    def note(self, name: str) -> None:
        """Note the figures of a program that has just ended."""
        over = timeline(self._trace(), self._device)
        categories = over.categories[:, self._start :]
        self.most[name] = [int(categories[Category[kind]].max(initial=0)) for kind in SHARED_OUT]
        self._start = len(over.rows)


class Block(nn.Module):
    """A residual block of two linear layers, whose widths no world divides evenly."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = given + self.down(torch.relu(self.up(given)))
        return out


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str, live: Live, width: int
) -> list[int]:
    held = [live()]
    for _ in range(2):
        given = torch.ones(4, 6, width, device=device)
        loss = model(given).sum()
        held.append(live())
        loss.backward()
        held.append(live())
        optimizer.step()
        held.append(live())
        optimizer.zero_grad()
        del loss, given
        held.append(live())
    return held


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if mesh.device_type == "cuda" else torch.device("cpu")


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    """States on the device alone: AdamW counts its steps on the host."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def ddp(mesh: DeviceMesh, live: Live) -> list[int]:
    """Buckets of 1 MiB beside the gradients, and buffers that are broadcast."""
    model = nn.Sequential(*[Block(300, 500) for _ in range(4)], nn.LayerNorm(300)).to(mesh.device_type)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    return _steps(wrapped, _momentum(wrapped), mesh.device_type, live, 300)


def ddp_views(mesh: DeviceMesh, live: Live) -> list[int]:
    """Gradients that are views of the buckets, a static graph, and steps without synchronisation."""
    model = nn.Sequential(*[Block(300, 500) for _ in range(2)]).to(mesh.device_type)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True, static_graph=True)
    held = _steps(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3), mesh.device_type, live, 300)
    with wrapped.no_sync():
        wrapped(torch.ones(4, 300, device=mesh.device_type)).sum().backward()
        held.append(live())
    return held


def fsdp2(mesh: DeviceMesh, live: Live) -> list[int]:
    """Shards of uneven parameters, gathered for each block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(*[Block(300, 501) for _ in range(3)]).to(mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number != 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _steps(model, _momentum(model), mesh.device_type, live, 300)


def tensor_parallel(mesh: DeviceMesh, live: Live) -> list[int]:
    """Column and row shards with a sharded sequence between them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.LayerNorm(304), nn.Linear(304, 504), nn.ReLU(), nn.Linear(504, 304)).to(
        mesh.device_type
    )
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh, plan)
    return _steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), mesh.device_type, live, 304)


def zero(mesh: DeviceMesh, live: Live) -> list[int]:
    """States of the optimizer shared out among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(*[Block(300, 500 + number) for number in range(3)]).to(mesh.device_type)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=1e-3, momentum=0.9)
    return _steps(wrapped, optimizer, mesh.device_type, live, 300)


def two_dimensions(both: DeviceMesh, live: Live) -> list[int]:
    """Tensor parallel within pairs of ranks, FSDP2 and replicas across them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(*[Block(300, 500) for _ in range(3)]).to(both.device_type)
    for block in model:
        parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    return _steps(model, _momentum(model), both.device_type, live, 300)


def pipeline(mesh: DeviceMesh, live: Live) -> list[int]:
    """One stage on each rank, two schedules; stages learn the shapes of what they exchange from one another."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    device = _device(mesh)
    held = []
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        module = nn.Sequential(*[Block(300, 500 + rank) for _ in range(2)]).to(device)
        stage = PipelineStage(module, rank, world, device)
        schedule = schedule_type(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = _momentum(module)
        given = {"target": torch.ones(16, 300, device=device)} if rank == world - 1 else {}
        for _ in range(2):
            schedule.step(*([torch.ones(16, 300, device=device)] if rank == 0 else []), **given)
            held.append(live())
            optimizer.step()
            optimizer.zero_grad()
            held.append(live())
    return held


def loss_parallel(mesh: DeviceMesh, live: Live) -> list[int]:
    """A head whose words are shared out, and a loss that is computed on the parts."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel import loss_parallel as in_parts

    model = nn.Sequential(nn.Linear(304, 504), nn.ReLU(), nn.Linear(504, 1000)).to(mesh.device_type)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    first = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(model, mesh, {"0": first, "2": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = [live()]
    for _ in range(2):
        words = torch.zeros(24, dtype=torch.int64, device=mesh.device_type)
        with in_parts():
            loss = nn.functional.cross_entropy(model(torch.ones(24, 304, device=mesh.device_type)), words)
            held.append(live())
            loss.backward()
        held.append(live())
        optimizer.step()
        optimizer.zero_grad()
        del loss, words
        held.append(live())
    return held


def fsdp1(mesh: DeviceMesh, live: Live) -> list[int]:
    """Flat parameters, gathered for each block, with the parameters that the program made."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = nn.Sequential(*[Block(300, 501) for _ in range(3)])
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=_device(mesh),
        use_orig_params=True,
    )
    return _steps(wrapped, _momentum(wrapped), mesh.device_type, live, 300)


def experts(mesh: DeviceMesh, live: Live) -> list[int]:
    """An expert on each rank; tokens go there and back by all-to-alls of equal parts."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    def exchanged(tokens: torch.Tensor) -> torch.Tensor:
        parts = [tokens.shape[0] // mesh.size()] * mesh.size()
        out: torch.Tensor = all_to_all_single_autograd(tokens, parts, parts, mesh.get_group())
        return out

    model = nn.Sequential(*[Block(300, 500) for _ in range(2)]).to(mesh.device_type)
    optimizer = _momentum(model)
    held = [live()]
    for _ in range(2):
        tokens = torch.ones(64, 300, device=mesh.device_type, requires_grad=True)
        for expert in model:
            tokens = exchanged(expert(exchanged(tokens)))
        held.append(live())
        tokens.sum().backward()
        held.append(live())
        optimizer.step()
        optimizer.zero_grad()
        del tokens
        held.append(live())
    return held


def interleaved(mesh: DeviceMesh, live: Live) -> list[int]:
    """Two stages on each rank by turns: forward and backward passes interleaved, backward passes in two halves."""
    from torch.distributed import pipelining

    ends = (0, dist.get_world_size() - 1)
    schedules = (pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleInterleavedZeroBubble)
    return _looped(mesh, live, schedules, ends=ends, turned=False)


def zero_bubble_v(mesh: DeviceMesh, live: Live) -> list[int]:
    """Two stages on each rank in the form of a V, without bubbles: the first rank has the last stage too."""
    from torch.distributed import pipelining

    return _looped(mesh, live, (pipelining.ScheduleZBVZeroBubble,), ends=(0, 0), turned=True)


def context_parallel(mesh: DeviceMesh, live: Live) -> list[int]:
    """A sequence that is shared out, with keys and values that go around in a ring (torch's own, over a stand-in)."""
    from torch.distributed.tensor.experimental import context_parallel as shared_out

    if mesh.device_type == "cpu":
        _attention_on_host()
    project = nn.Linear(256, 768).to(mesh.device_type)
    optimizer = torch.optim.SGD(project.parameters(), lr=1e-3, momentum=0.9)
    held = [live()]
    with _only_flash_attention():
        for _ in range(2):
            given = torch.ones(2, 64, 256, device=mesh.device_type)
            with shared_out(mesh, buffers=[given], buffer_seq_dims=[1], no_restore_buffers={given}):
                heads = project(given).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
                out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
                held.append(live())
                out.sum().backward()
            held.append(live())
            del given, heads, out
            optimizer.step()
            optimizer.zero_grad()
            held.append(live())
    return held


@contextmanager
def _only_flash_attention() -> Iterator[None]:
    """The operator that context parallelism divides, called by its name: a CPU would choose one that it does not."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal
        )[0]
        return out

    before = nn.functional.scaled_dot_product_attention
    attention.__name__ = before.__name__
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = before


def _attention_on_host() -> None:
    """Give flash attention, which torch has for cards alone, results of the same sizes on the CPU."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        # As on a card: the output lies batch, sequence, heads, width (native/transformers/cuda/attention.cu).
        out = torch.empty_like(query.transpose(1, 2)).transpose(1, 2).zero_()
        sums = query.new_zeros(query.shape[:3], dtype=torch.float32)
        state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        nothing = query.new_zeros(0)
        return out, sums, None, None, query.shape[2], key.shape[2], state, unused, nothing

    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    _LIBRARIES.append(library)


def _looped(
    mesh: DeviceMesh, live: Live, schedules: Sequence[Any], *, ends: tuple[int, int], turned: bool
) -> list[int]:
    """Schedules of two stages on each rank, the second of which lie in reverse order if they are turned."""
    from torch.distributed.pipelining import PipelineStage

    rank, world = dist.get_rank(), dist.get_world_size()
    device = _device(mesh)
    numbers = (rank, 2 * world - 1 - rank if turned else world + rank)
    held = []
    for schedule_type in schedules:
        modules = [
            nn.Sequential(*[Block(300, 500 + number) for _ in range(2)]).to(device) for number in numbers
        ]
        stages = [
            PipelineStage(module, number, 2 * world, device)
            for module, number in zip(modules, numbers, strict=True)
        ]
        schedule = schedule_type(stages, 2 * world, loss_fn=nn.functional.mse_loss)
        optimizer = _momentum(nn.ModuleList(modules))
        target = {"target": torch.ones(16, 300, device=device)} if rank == ends[1] else {}
        for _ in range(2):
            schedule.step(*([torch.ones(16, 300, device=device)] if rank == ends[0] else []), **target)
            held.append(live())
            optimizer.step()
            optimizer.zero_grad()
            held.append(live())
    return held


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        *(ddp, ddp_views, fsdp1, fsdp2, tensor_parallel, loss_parallel, two_dimensions, zero, experts),
        *(context_parallel, pipeline, interleaved, zero_bubble_v),
    )
}

PIPELINES = frozenset({"pipeline", "interleaved", "zero_bubble_v"})


def run_all(device: str, live: Live, names: Sequence[str], shared: SharedOut) -> dict[str, list[int]]:
    """What each of some programs holds after each part of its steps, in bytes over what was held before it."""

    def collected() -> int:
        return _settled(live)

    found = {}
    gc.freeze()  # what is there by now need not be looked through each time
    # Before anything is counted: a mesh keeps its ranks in tensors of the host.
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    both = init_device_mesh(
        device,
        (max(1, dist.get_world_size() // 2), min(2, dist.get_world_size())),
        mesh_dim_names=("dp", "tp"),
    )
    _ = both["dp"], both["tp"]
    for name in names:
        torch.manual_seed(0)
        before = collected()
        held = PROGRAMS[name](both if name == "two_dimensions" else mesh, collected)
        found[name] = [now - before for now in held]
        shared.note(name)
    gc.unfreeze()
    return found


def real(rank: int, world: int, folder: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Run programs as a real rank, metered."""
    from vramfit.record.cpu_recorder import CpuRecorder

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    recorder = CpuRecorder(alloc_conf="")
    recorder.start()
    shared = SharedOut(lambda: recorder.run().trace, 0)
    try:
        found = run_all("cpu", lambda: recorder.figures().allocated, names, shared)
        _keep(folder, "real", world, rank, shared)
    finally:
        recorder.stop(None)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _settled(live: Live) -> int:
    """What is held for a while: threads of gloo and autograd let go of tensors a little after the program goes on."""
    looks: list[int] = []
    for _ in range(500):
        time.sleep(0.01)
        gc.collect()
        looks.append(live())
        if len(looks) >= 5 and len(set(looks[-5:])) == 1:
            break
    return looks[-1]


def virtual(rank: int, world: int, folder: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Run programs as a virtual rank; cuBLAS's workspaces, which a CPU has not, go before each look."""
    from vramfit.virtual.gpu import VirtualGPU

    def live() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    mailbox = folder / f"mailbox-{world}"
    mailbox.mkdir(exist_ok=True)
    with VirtualGPU(
        "H100", rank=rank, world_size=world, mailbox=mailbox, alloc_conf="", writes="real"
    ) as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank)
        shared = SharedOut(lambda: gpu.trace, rank)
        found = run_all("cuda", live, names, shared)
        _keep(folder, "virtual", world, rank, shared)
        return found


def _keep(folder: Path, kind: str, world: int, rank: int, shared: SharedOut) -> None:
    (folder / f"shared-{kind}-{world}-{rank}.json").write_text(json.dumps(shared.most))


def virtual_ranks(world: int, names: Sequence[str]) -> Sequence[int]:
    """Ranks that run virtually too: one in the middle and the last, all where each is a stage of a pipeline."""
    return range(world) if PIPELINES & set(names) else (world // 2 - 1, world - 1)


def main(folder: Path, worlds: Mapping[int, Sequence[str]]) -> None:
    """Run programs on all ranks of worlds, real and virtual, as forks of this process, which imports for all of them.

    Each rank leaves its figures in the folder.
    """
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    import vramfit.record.cpu_recorder
    import vramfit.virtual.gpu  # noqa: F401

    for world, names in worlds.items():
        for kind in (real, virtual):
            ranks = range(world) if kind is real else virtual_ranks(world, names)
            children = [_start(kind, rank, world, folder, names) for rank in ranks]
            endings = [os.waitpid(child, 0)[1] for child in children]
            if any(endings):
                sys.exit(1)


def _start(
    kind: Callable[[int, int, Path, Sequence[str]], dict[str, list[int]]],
    rank: int,
    world: int,
    folder: Path,
    names: Sequence[str],
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        found = kind(rank, world, folder, names)
        (folder / f"{kind.__name__}-{world}-{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _asked(words: Sequence[str]) -> dict[int, list[str]]:
    """Worlds and their programs, from words like ``2:ddp,zero``; all programs without names."""
    split = [word.partition(":") for word in words]
    return {int(world): names.split(",") if names else list(PROGRAMS) for world, _, names in split}


if __name__ == "__main__":
    main(Path(sys.argv[1]), _asked(sys.argv[2:]))
