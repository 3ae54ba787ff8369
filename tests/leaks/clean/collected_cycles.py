"""Makes reference cycles, and collects them every third round."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import torch
from torch import Tensor


class Node:
    def __init__(self, batch: Tensor) -> None:
        self.batch, self.me = batch, self


def program(device: str) -> Callable[[], object]:
    rounds = itertools.count(1)

    def serve() -> None:
        Node(torch.ones(64, 64, device=device))
        if next(rounds) % 3 == 0:
            gc.collect()

    return serve
