"""Keeps the last three outputs, to compare with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

recent: deque[Tensor] = deque(maxlen=3)


def program(device: str) -> Callable[[], object]:
    return lambda: recent.append(torch.ones(64, 64, device=device))
