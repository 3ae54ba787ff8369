"""Metrics as numbers of Python, a schedule of the learning rate, and their history."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

history: list[tuple[float, float]] = []


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def train() -> Tensor:
        loss = model(torch.ones(32, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        history.append((loss.item(), schedule.get_last_lr()[0]))
        return loss.detach()

    return train
