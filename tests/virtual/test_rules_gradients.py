"""Gradients that a card writes into one fresh tensor are counted once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

SIZE = (256, 512)
BYTES = 256 * 512 * 4


def long(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="cuda")


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1).values,
    "min": lambda x: x.min(1).values,
    "median": lambda x: x.median(1).values,
    "kthvalue": lambda x: x.kthvalue(3, 1).values,
    "topk": lambda x: x.topk(3, 1).values,
    "sort": lambda x: x.sort(1).values,
    "gather": lambda x: x.gather(1, long(256, 5)),
    "index": lambda x: x[long(5)],
    "index_select": lambda x: x.index_select(0, long(5)),
    "masked_select": lambda x: x.masked_select(x.detach() > 0),
    "trace": lambda x: x.trace(),
}


def allocations(gpu: VirtualGPU, start: int) -> list[int]:
    """Sizes of the blocks taken since an event."""
    trace = gpu.trace
    return trace.size[start:][trace.kind[start:] == EventKind.ALLOC].tolist()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_gradient_is_written_into_one_tensor(gpu: VirtualGPU, name: str) -> None:
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    y = FORMULAS[name](x)
    gradient = torch.ones_like(y)
    start = len(gpu.trace)
    y.backward(gradient)
    assert allocations(gpu, start).count(BYTES) == 1
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_binary_cross_entropy_reuses_the_sigmoid_and_spares_the_weight(gpu: VirtualGPU) -> None:
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    target, weight = torch.ones(SIZE, device="cuda"), torch.full(SIZE, 3.0, device="cuda")
    loss = F.binary_cross_entropy_with_logits(x, target)
    start = len(gpu.trace)
    loss.backward()
    assert allocations(gpu, start).count(BYTES) == 1  # sigmoid, which becomes the gradient
    loss = F.binary_cross_entropy_with_logits(x, target, pos_weight=weight)
    start = len(gpu.trace)
    loss.backward()
    # pos_weight * target, one more than that, which becomes the gradient, and the sigmoid.
    assert allocations(gpu, start).count(BYTES) == 3


def test_a_graph_of_the_backward_pass_keeps_the_op_that_autograd_sees(gpu: VirtualGPU) -> None:
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad((x.max(1).values ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.shape == x.shape
    assert gpu.run.oom is None


def test_an_index_on_the_host_is_copied_for_the_time_of_the_op(gpu: VirtualGPU) -> None:
    x = torch.zeros(SIZE, device="cuda")
    rows = torch.arange(256)
    start = len(gpu.trace)
    x[rows, long(256)]
    assert 256 * 8 in allocations(gpu, start)[1:]
    before = torch.cuda.memory_allocated()
    y = x[rows]
    assert torch.cuda.memory_allocated() == before + y.nbytes
