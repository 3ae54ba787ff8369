"""The size of the world: as many ops for 1,024 ranks as for eight, and what FSDP2 divides is divided."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning")


def step(rank: int, world: int) -> tuple[int, int, float]:
    """Ops, bytes of shards and gradients, and simulated seconds of a training step under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    with VirtualGPU("H100", rank=rank, world_size=world, alloc_conf="") as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank % 8)
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        start = gpu.mode.machine.clock_us
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch._C._cuda_clearCublasWorkspaces()
        return gpu.run.ops, torch.cuda.memory_allocated(), gpu.mode.machine.clock_us - start


def test_the_world_adds_no_ops() -> None:
    small, large = step(7, 8), step(1023, 1024)
    assert small[0] == large[0]
    assert small[1] - large[1] == 2 * 4 * (1024 * 1024 * 4 // 8 - 1024 * 1024 * 4 // 1024)
    assert large[2] > small[2]  # a ring of 1,024 takes its time
