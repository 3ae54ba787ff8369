"""Gradients add up over three rounds before a step drops them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    rounds = itertools.count(1)

    def train() -> None:
        model(torch.ones(32, 64, device=device)).square().mean().backward()
        if next(rounds) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return train
