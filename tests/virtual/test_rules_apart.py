"""Ops that torch makes of others below autograd hold on a card what those others make."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

WHOLE = 4096 * 1024 * 4
ROW = 4096 * 4


def requests(call: Callable[[Tensor], object]) -> list[int]:
    """Bytes that a call takes (positive) and gives back (negative), in order, until its results go."""
    with VirtualGPU("RTX 4090") as gpu:
        x = torch.ones(4096, 1024, device="cuda", requires_grad=True)
        start = len(gpu.trace.kind)
        kept = call(x)
        end = len(gpu.trace.kind)
        del kept
    trace = gpu.trace
    signs = {EventKind.ALLOC: 1, EventKind.FREE_REQUESTED: -1}
    return [
        signs[EventKind(kind)] * int(size)
        for kind, size in zip(trace.kind[start:end], trace.size[start:end], strict=True)
        if kind in signs
    ]


def test_logsumexp_holds_the_differences_from_the_largest() -> None:
    # ReduceOps.cpp logsumexp_out: amax; its abs() == inf (a number and a byte each); exp(self - maxes), summed
    taken = requests(lambda x: x.logsumexp(1))
    assert taken == [ROW, ROW, 4096, -4096, -ROW, WHOLE, ROW, -WHOLE, -ROW]


def test_binary_cross_entropy_with_logits_holds_two_tensors_of_its_size() -> None:
    # Loss.cpp: log_sigmoid(input), 1 - target in place, then their mean; the losses themselves when unreduced
    unreduced = requests(lambda x: F.binary_cross_entropy_with_logits(x, x.detach(), reduction="none"))
    assert unreduced == [WHOLE, WHOLE, -WHOLE]
    weighted = requests(
        lambda x: F.binary_cross_entropy_with_logits(
            x, x.detach(), pos_weight=torch.ones(1024, device=x.device), reduction="none"
        )
    )
    # pos_weight, which autograd keeps; log_sigmoid; pos_weight - 1 and its product with the target, given back; then
    # 1 - target
    assert weighted == [4096, WHOLE, 4096, WHOLE, -4096, -WHOLE, WHOLE, -WHOLE]


def test_isinf_takes_absolute_values_first() -> None:
    assert requests(lambda x: x.isinf()) == [WHOLE, WHOLE // 4, -WHOLE]


def test_soft_margin_losses_keep_their_unreduced_storage() -> None:
    taken = requests(lambda x: F.soft_margin_loss(x, x.detach()))
    assert taken[0] == WHOLE
    assert -WHOLE not in taken  # resized to a number, the storage stays


def test_distributions_check_their_arguments() -> None:
    with VirtualGPU("RTX 4090"):
        mean = torch.nn.Linear(64, 64).cuda()(torch.randn(512, 64, device="cuda"))
        drawn = torch.distributions.Normal(mean, mean.exp()).rsample()
        assert drawn.shape == (512, 64)
