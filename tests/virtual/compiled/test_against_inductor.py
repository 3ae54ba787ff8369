"""Memory of compiled programs against Inductor itself: its programs for the CPU, and the text of those for the card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.compiled.inductor_program import Written, recorded_programs, written_for_cpu
from torch import Tensor, nn

from vramfit.virtual.gpu import VirtualGPU

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.usefixtures("kept_workspaces"),
]
WIDTH = 256
ROWS = 128


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(x * 2 + 1)).sigmoid()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).relu()


def held_and_peak(step: Callable[[], object]) -> tuple[int, int, object]:
    """Bytes that a function leaves allocated, and most of them at once, on top of what there was."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result


@pytest.mark.parametrize(
    ("build", "backward"),
    [
        pytest.param(Chain, True, id="pointwise"),
        pytest.param(Block, True, id="mlp-block"),
        pytest.param(Products, True, id="products"),
        # A card splits its long reductions into two kernels with a buffer between them, a CPU does not.
        pytest.param(Scaled, False, id="rms-norm"),
    ],
)
def test_saved_tensors_and_buffers_are_those_of_torch_on_the_cpu(
    build: Callable[[], nn.Module], backward: bool
) -> None:
    host = written_for_cpu(build(), torch.randn(ROWS, WIDTH, requires_grad=True))
    figures: dict[str, int] = {}

    def run() -> None:
        with VirtualGPU("RTX 4090", alloc_conf=""):
            model = build().cuda()
            compiled = torch.compile(model)
            x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
            compiled(x).sum().backward()  # cuBLAS's workspaces are there from now on
            model.zero_grad()
            x.grad = None
            figures["saved"], figures["peak"], y = held_and_peak(lambda: compiled(x))
            gradient = torch.ones_like(y)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y.backward(gradient)
            figures["backward"] = torch.cuda.max_memory_allocated() - before

    card = recorded_programs(run)
    expected = Written(host["forward"])
    found = Written(card["forward"])
    assert (found.left, found.peak) == (expected.left, expected.peak), (
        "what is saved, and what there is at once"
    )
    if backward:
        assert Written(card["backward"]).peak == Written(host["backward"]).peak
    # And the virtual card counted just what stands in the program written for it, in the allocator's blocks.
    blocks = Written(card["forward"], block=512)
    assert (figures["saved"], figures["peak"]) == (blocks.left, blocks.peak)
    assert 0 < figures["backward"] <= Written(card["backward"], block=512).peak  # saved tensors go meanwhile


def test_a_chain_of_pointwise_ops_needs_its_result_alone() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(1024)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(F.gelu(x) + 1)) * x

    with VirtualGPU("RTX 4090", alloc_conf=""), torch.no_grad():
        model = Deep().cuda()
        x = torch.randn(4096, 1024, device="cuda")
        eager = held_and_peak(lambda: model(x))[1]
        model.compile()
        compiled = held_and_peak(lambda: model(x))[1]
    assert compiled == x.numel() * 4
    assert eager >= 2 * compiled
