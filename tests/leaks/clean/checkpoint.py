"""Saves a checkpoint of the model in every round."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import nn


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)

    def save() -> None:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, io.BytesIO())

    return save
