"""Puts results into a queue that nobody empties."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"results\.queue\[\d+\]"
results: queue.Queue[Tensor] = queue.Queue()


def program(device: str) -> Callable[[], object]:
    return lambda: results.put(torch.ones(64, 64, device=device))
