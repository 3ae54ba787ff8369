"""Hands results to futures that stay in a table of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

OWNER = r"requests\[\d+\]\._result"
requests: dict[int, Future[Tensor]] = {}


def program(device: str) -> Callable[[], object]:
    def serve() -> None:
        future: Future[Tensor] = Future()
        requests[len(requests)] = future
        future.set_result(torch.ones(64, 64, device=device))

    return serve
