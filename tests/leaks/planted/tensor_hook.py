"""A hook of a tensor uses the tensor itself: a circle through the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

OWNER = r"^reference cycle through the autograd graph of .*closure hidden"


def program(device: str) -> Callable[[], object]:
    weight = torch.ones(64, 64, device=device, requires_grad=True)

    def train() -> None:
        hidden = weight.sin()
        hidden.register_hook(lambda gradient: gradient * hidden)

    return train
