"""A context variable gathers what each request computed."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

OWNER = r"^context variable trail\[\d+\]$"

trail: ContextVar[tuple[Tensor, ...]] = ContextVar("trail", default=())


def program(device: str) -> Callable[[], object]:
    def answer() -> None:
        trail.set((*trail.get(), torch.ones(64, 64, device=device)))

    return answer
