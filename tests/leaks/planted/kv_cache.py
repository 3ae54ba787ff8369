"""A key-value cache that no request resets: each token makes it longer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"cache\.keys$"


class Cache:
    keys: Tensor | None = None

    def append(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        return self.keys


cache = Cache()


def program(device: str) -> Callable[[], object]:
    return lambda: cache.append(torch.ones(1, 8, 4, 64, device=device))
