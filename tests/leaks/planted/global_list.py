"""Keeps every prediction in a list of the module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

OWNER = r"predictions\[\d+\]$"
predictions: list[Tensor] = []


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)

    @torch.no_grad()
    def predict() -> None:
        predictions.append(model(torch.ones(32, 64, device=device)))

    return predict
