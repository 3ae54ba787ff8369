"""Collects into a default argument, which is made once and for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"collect -> defaults\[0\]\[\d+\]"


def collect(batch: Tensor, into: list[Tensor] = []) -> list[Tensor]:  # noqa: B006  # the mistake that is planted
    into.append(batch)
    return into


def program(device: str) -> Callable[[], object]:
    return lambda: collect(torch.ones(64, 64, device=device))
