"""Takes hooks for one round and removes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)

    def look() -> int:
        seen: list[Tensor] = []
        handle = model.register_forward_hook(lambda layer, inputs, output: seen.append(output))
        model(torch.ones(32, 64, device=device))
        handle.remove()
        return len(seen)

    return look
