"""Fails, handles the error, and lets go of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def work(batch: Tensor) -> None:
    hidden = batch * 2
    raise ValueError(f"{hidden.shape} cannot be used")


def program(device: str) -> Callable[[], object]:
    def serve() -> None:
        try:
            work(torch.ones(64, 64, device=device))
        except ValueError as error:
            str(error)

    return serve
