"""Adds up the loss of the epoch as a tensor: each step hangs its graph on the last one's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

OWNER = r"epoch\.total -> grad_fn AddBackward0 -> .*saved"


class Epoch:
    total: Tensor | float = 0.0


epoch = Epoch()


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)

    def train() -> None:
        loss = model(torch.ones(32, 64, device=device)).square().mean()
        loss.backward(retain_graph=True)
        epoch.total = epoch.total + loss

    return train
