"""``torch.compile`` of what DDP and FSDP2 wrap: the same communication and states, and torch's own cut at buckets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler asks for it
]
LAYERS, WIDTH, ROWS = 3, 1024, 256
LAYER = WIDTH * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.up(x)) * x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain_ddp(model: Blocks) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=4)  # a layer each


def compiled_ddp(model: Blocks) -> nn.Module:
    compiled: nn.Module = torch.compile(plain_ddp(model))
    return compiled


def plain_fsdp(model: Blocks) -> nn.Module:
    for block in model.layers:
        fully_shard(block)
    return fully_shard(model)


def compiled_fsdp(model: Blocks) -> nn.Module:
    for block in model.layers:
        block.compile()
    return plain_fsdp(model)


def train(wrap: Callable[[Blocks], nn.Module]) -> tuple[VirtualGPU, list[int]]:
    """A rank, and what it holds between steps and at their peaks."""
    torch._dynamo.reset()
    held = []
    with VirtualGPU("H100", rank=7, world_size=8, alloc_conf="") as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(7)
        model = wrap(Blocks().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.rand(ROWS, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            held += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        dist.destroy_process_group()
    return gpu, held


def taken(gpu: VirtualGPU, category: Category) -> list[int]:
    """Sizes of what was taken for something, in order of size."""
    trace = gpu.trace
    return sorted(
        int(trace.size[row])
        for row in range(len(trace.kind))
        if trace.kind[row] == EventKind.ALLOC and trace.category[row] == category
    )


@pytest.mark.parametrize(
    ("plain", "compiled", "graphs"),
    [
        pytest.param(plain_ddp, compiled_ddp, LAYERS, id="DDP, cut at its buckets"),
        pytest.param(
            plain_fsdp, compiled_fsdp, 2, id="FSDP2, the first layer apart: its input has no gradient"
        ),
    ],
)
def test_compiled_ranks_communicate_and_keep_the_same_and_save_less(
    plain: Callable[[Blocks], nn.Module], compiled: Callable[[Blocks], nn.Module], graphs: int
) -> None:
    eager, held = train(plain)
    counters.clear()
    gpu, found = train(compiled)
    assert counters["aot_autograd"] == {"total": graphs, "ok": graphs}
    assert found[::2] == held[::2]
    for category in Category:
        if category not in (Category.ACTIVATIONS, Category.TEMPORARIES, Category.INPUTS, Category.OTHER):
            assert taken(gpu, category) == taken(eager, category), category
    assert taken(gpu, Category.COMMUNICATION_BUFFERS).count(LAYER) >= LAYERS
    assert sum(taken(gpu, Category.ACTIVATIONS)) < sum(taken(eager, Category.ACTIVATIONS))
    assert {warning.code for warning in gpu.run.warnings} == {"compiled-estimate", "nccl-estimated"}
