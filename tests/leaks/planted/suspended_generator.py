"""Starts to read ahead and does not finish: each suspended generator holds its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

OWNER = r"readers\[\d+\] -> suspended read_ahead\(\) \(suspended_generator\.py:\d+\) local batch"
readers: list[Iterator[Tensor]] = []


def read_ahead(device: str) -> Iterator[Tensor]:
    batch = torch.ones(64, 64, device=device)
    yield batch
    yield batch * 2


def program(device: str) -> Callable[[], object]:
    def read() -> None:
        readers.append(read_ahead(device))
        next(readers[-1])

    return read
