"""A cache of masks that fills in four rounds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.lru_cache(maxsize=8)
def mask(length: int, device: str) -> Tensor:
    return torch.ones(length, length, device=device).tril()


def program(device: str) -> Callable[[], object]:
    lengths = itertools.cycle([16, 32, 48, 64])
    return lambda: mask(next(lengths), device)
