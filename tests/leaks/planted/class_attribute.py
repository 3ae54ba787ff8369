"""Registers every batch in a list that belongs to the class, not to the object."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"class_attribute\.Batch\.seen\[\d+\]"


class Batch:
    seen: list[Tensor] = []  # noqa: RUF012  # the mistake that is planted

    def __init__(self, data: Tensor) -> None:
        self.seen.append(data)


def program(device: str) -> Callable[[], object]:
    return lambda: Batch(torch.ones(64, 64, device=device))
