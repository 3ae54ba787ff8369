"""``torch.export`` on the virtual card, and the pipelines that torch makes with it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vramfit.virtual.gpu import VirtualGPU


def test_what_is_exported_runs_on_the_card_and_takes_nothing_meanwhile() -> None:
    with VirtualGPU("H100", alloc_conf=""):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
        given = torch.randn(8, 64, device="cuda").chunk(2)[0]  # a view, of which torch makes symbolic sizes
        before = torch.cuda.memory_allocated()
        exported = torch.export.export(model, (given,)).module()
        assert torch.cuda.memory_allocated() == before
        exported(given).sum().backward()
        assert model[0].weight.grad is not None and model[0].weight.grad.is_cuda


class Skipping(nn.Module):
    """What the first layer gives reaches the last stage past the one between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](given)
        out: torch.Tensor = self.layers[2](torch.relu(self.layers[1](first)) + first)
        return out


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_pipeline_is_cut_out_of_a_model() -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    with VirtualGPU("H100", rank=1, world_size=2, alloc_conf=""):
        dist.init_process_group("nccl")
        card = torch.device("cuda", 1)
        pipe = pipeline(Skipping(), (torch.randn(4, 64),), split_spec={"layers.2": SplitPoint.BEGINNING})
        assert (pipe.num_stages, torch.cuda.memory_allocated(card)) == (2, 0)
        stage = pipe.build_stage(1, card)
        kept = torch.cuda.memory_allocated(card)
        del stage
    assert kept == 64 * 64 * 4 + 512  # the last layer's weights, and its bias in a block of the allocator's
