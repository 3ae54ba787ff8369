"""Plain training with AdamW: state and gradients come into being in the first step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def program(device: str) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> Tensor:
        loss = model(torch.ones(32, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train
