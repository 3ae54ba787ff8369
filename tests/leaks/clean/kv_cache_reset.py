"""A key-value cache that every request begins anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Cache:
    keys: Tensor | None = None


cache = Cache()


def program(device: str) -> Callable[[], object]:
    def request() -> None:
        cache.keys = None
        for _ in range(4):
            new = torch.ones(1, 8, 1, 64, device=device)
            cache.keys = new if cache.keys is None else torch.cat([cache.keys, new], dim=2)

    return request
