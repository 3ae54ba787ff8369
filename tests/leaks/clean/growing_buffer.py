"""A buffer that is replaced by a larger one whenever a larger batch comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor


class Workspace:
    buffer: Tensor | None = None

    def get(self, count: int, device: str) -> Tensor:
        if self.buffer is None or self.buffer.numel() < count:
            self.buffer = None
            self.buffer = torch.empty(1 << (count - 1).bit_length(), device=device)
        return self.buffer[:count]


workspace = Workspace()


def program(device: str) -> Callable[[], object]:
    counts = itertools.cycle([700, 300, 5000, 900, 2000, 9000, 400])
    return lambda: workspace.get(next(counts), device).zero_().sum()
