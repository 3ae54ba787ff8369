"""Remembers the last error of a service: each was raised while the one before was at hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"service\.last_error(\.__cause__)+ ValueError traceback -> Service\.work\(\)"


class Service:
    last_error: Exception | None = None

    def work(self, batch: Tensor) -> None:
        scaled = batch * 2
        raise ValueError("no") from self.last_error if scaled.shape else None


service = Service()


def program(device: str) -> Callable[[], object]:
    def serve() -> None:
        try:
            service.work(torch.ones(32, 64, device=device))
        except ValueError as error:
            service.last_error = error

    return serve
