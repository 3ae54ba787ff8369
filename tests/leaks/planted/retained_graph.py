"""Keeps the last losses of every step for a second backward pass that never comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

OWNER = r"pending\['second pass'\]\[\d+\]\[1\] -> grad_fn SumBackward0 -> .*saved"
pending: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)


def program(device: str) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)

    def train() -> None:
        loss = model(torch.ones(32, 64, device=device)).exp().sum()
        loss.backward(retain_graph=True)
        pending["second pass"].append((len(pending), loss))

    return train
