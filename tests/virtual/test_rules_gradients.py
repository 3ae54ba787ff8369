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


def kept_bytes(gpu: VirtualGPU, op: str) -> list[int]:
    """Bytes that an op asked for, in order."""
    trace = gpu.trace
    return [
        int(size)
        for size, kind, name in zip(trace.size, trace.kind, trace.op, strict=True)
        if kind == EventKind.ALLOC and trace.ops[name] == op
    ]


def test_one_number_written_through_a_mask_fills_it() -> None:
    with VirtualGPU("RTX 4090") as gpu:
        x = torch.zeros(1000, 64, device="cuda")
        x[x > 0] = 1.0  # a number of the host: canDispatchToMaskedFill
    assert kept_bytes(gpu, "aten.nonzero") == []
    with VirtualGPU("RTX 4090") as gpu:
        x = torch.zeros(1000, 64, device="cuda")
        x[x > 0] = torch.ones((), device="cuda")  # a number of the card: positions first
    assert kept_bytes(gpu, "aten.nonzero")[-1] > 0


def test_only_a_program_s_own_accumulating_writes_look_for_indices_out_of_range() -> None:
    def written(write: Callable[[Tensor, Tensor], object]) -> list[int]:
        with VirtualGPU("RTX 4090") as gpu:
            x = torch.zeros(100, 64, device="cuda", requires_grad=True)
            write(x, torch.zeros(500, dtype=torch.int64, device="cuda"))
        return kept_bytes(gpu, "aten._index_put_impl_") + kept_bytes(gpu, "aten.index_put_")

    backward = written(lambda x, ids: (x[ids] * 2).sum().backward())
    direct = written(lambda x, ids: x.detach().index_put_((ids,), x.new_ones(500, 64), accumulate=True))
    assert direct[:4] == [8, 8, 1, 1]  # least and greatest, and each compared
    assert direct[4:] == backward
