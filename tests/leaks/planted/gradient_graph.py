"""Penalises gradients and leaves their graph in .grad, adding to it every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

OWNER = r"models\[0\]\.0\.weight\.grad -> grad_fn|weight\.grad"
models: list[nn.Module] = []


def program(device: str) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).to(device)
    models.append(model)
    weight = model[0].weight

    def train() -> None:
        loss = model(torch.ones(32, 64, device=device)).sum()
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    return train
