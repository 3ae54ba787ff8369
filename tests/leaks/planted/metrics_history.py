"""A metric keeps its values on the device, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"metrics\['accuracy'\]\.values\[\d+\]$"


class Accuracy:
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.values.append((scores.argmax(dim=1) == labels).float().mean())


metrics = {"accuracy": Accuracy()}


def program(device: str) -> Callable[[], object]:
    def validate() -> None:
        scores, labels = torch.ones(32, 10, device=device), torch.zeros(32, device=device)
        metrics["accuracy"].update(scores, labels)

    return validate
