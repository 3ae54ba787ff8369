"""Keeps the errors of failed batches, and with their tracebacks all that the failed calls had."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = (
    r"failures\[\d+\] ValueError traceback -> work\(\) \(exception_traceback\.py:\d+\) local (hidden|batch)"
)
failures: list[Exception] = []


def work(batch: Tensor) -> None:
    hidden = batch * 2
    if hidden.shape[0] == 32:
        raise ValueError("a batch that cannot be used")


def program(device: str) -> Callable[[], object]:
    def serve() -> None:
        try:
            work(torch.ones(32, 64, device=device))
        except ValueError as error:
            failures.append(error)

    return serve
