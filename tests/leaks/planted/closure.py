"""A callback remembers every activation in a variable of the function that made it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"callbacks\['end of step'\] -> closure seen\[\d+\]"
callbacks: dict[str, Callable[[Tensor], None]] = {}


def remember() -> Callable[[Tensor], None]:
    seen: list[Tensor] = []

    def callback(activation: Tensor) -> None:
        seen.append(activation.clone())

    return callback


def program(device: str) -> Callable[[], object]:
    callbacks["end of step"] = remember()
    return lambda: callbacks["end of step"](torch.ones(32, 64, device=device))
