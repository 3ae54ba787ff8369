"""Distributed programs that run for real on CPU tensors with gloo, and unchanged on a virtual rank.

As a script it starts a world of real processes, each of which meters what it holds: ``gloo_programs.py WORLD FOLDER``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

Live = Callable[[], int]
Program = Callable[[DeviceMesh, Live], list[int]]

ON_HOST = {"ddp_views": 512}
"""Bytes that a program holds on the host beside a card, and a run on the CPU in the same place: which parameters were
used, where DDP is given a static graph (reducer.cpp: ``local_used_map_``)."""


class Block(nn.Module):
    """A residual block of two linear layers, whose widths no world divides evenly."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = given + self.down(torch.relu(self.up(given)))
        return out


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, live: Live, width: int) -> list[int]:
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

    model = nn.Sequential(nn.LayerNorm(304), nn.Linear(304, 504), nn.ReLU(), nn.Linear(504, 304)).to(mesh.device_type)
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


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (ddp, ddp_views, fsdp2, tensor_parallel, two_dimensions, zero)
}


def run_all(device: str, live: Live) -> dict[str, list[int]]:
    """What each program holds after each part of its steps, in bytes over what was held before it."""
    def collected() -> int:
        gc.collect()
        return live()

    found = {}
    gc.freeze()  # what is there by now need not be looked through each time
    # Before anything is counted: a mesh keeps its ranks in tensors of the host.
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    both = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    _ = both["dp"], both["tp"]
    for name, program in PROGRAMS.items():
        torch.manual_seed(0)
        before = collected()
        held = program(both if name == "two_dimensions" else mesh, collected)
        found[name] = [now - before for now in held]
    gc.unfreeze()
    return found


def _rank(rank: int, world: int, folder: Path) -> None:
    """Run all programs as a real rank, metered, and leave the figures in the folder."""
    from vramfit.record.cpu_recorder import CpuRecorder

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    recorder = CpuRecorder(alloc_conf="")
    recorder.start()
    try:
        found = run_all("cpu", lambda: recorder.figures().allocated)
    finally:
        recorder.stop(None)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(world: int, folder: Path) -> None:
    """Start the ranks, as forks of this process, which imports for all of them."""
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel

    import vramfit.record.cpu_recorder  # noqa: F401

    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code = 1
            try:
                _rank(rank, world, folder)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
