"""Registers a buffer for every batch that the model has seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

OWNER = r"model\.batch_\d+$"


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.register_buffer(f"batch_{self.seen}", batch)
        self.seen += 1
        return batch


model = Memory()


def program(device: str) -> Callable[[], object]:
    return lambda: model(torch.ones(64, 64, device=device))
