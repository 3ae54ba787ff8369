"""Validates every second round, and keeps the last outputs for a plot."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Plot:
    outputs: Tensor | None = None


plot = Plot()


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)
    rounds = itertools.count(1)

    def train() -> None:
        model(torch.ones(32, 64, device=device)).sum().backward()
        model.zero_grad()
        if next(rounds) % 2 == 0:
            with torch.no_grad():
                plot.outputs = model(torch.ones(128, 64, device=device))

    return train
