"""A custom Function keeps what comes after it in its context: a circle through the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OWNER = r"^reference cycle through the autograd graph of .*DoubleBackward.*\.activation$"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def program(device: str) -> Callable[[], object]:
    weight = torch.ones(64, 64, device=device, requires_grad=True)

    def train() -> None:
        doubled = Double.apply(weight)  # type: ignore[no-untyped-call]
        doubled.grad_fn.activation = doubled.sin()

    return train
