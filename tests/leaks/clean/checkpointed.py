"""Recomputes activations in the backward pass, under autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def program(device: str) -> Callable[[], object]:
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.SGD(block.parameters())

    def train() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: Tensor = (
                checkpoint(block, torch.ones(32, 64, device=device), use_reentrant=False).float().mean()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train
