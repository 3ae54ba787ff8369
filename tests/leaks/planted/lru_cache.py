"""Caches masks without a bound, by a key that never comes again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"mask -> cached result"


@functools.cache
def mask(length: int, device: str) -> Tensor:
    return torch.ones(length, length, device=device).tril()


def program(device: str) -> Callable[[], object]:
    lengths = itertools.count(32)
    return lambda: mask(next(lengths), device)
