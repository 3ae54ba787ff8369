"""Gives a new head to the optimizer every round, which never forgets the old ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

OWNER = r"optimizers\[0\]\.state\[<(Parameter|FakeTensor) \(8, 64\)>\]\['exp_avg'\]"
optimizers: list[torch.optim.Optimizer] = []


def program(device: str) -> Callable[[], object]:
    body = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(body.parameters())
    optimizers.append(optimizer)

    def finetune() -> None:
        head = nn.Linear(64, 8).to(device)
        optimizer.add_param_group({"params": head.parameters()})
        head(body(torch.ones(4, 64, device=device))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return finetune
