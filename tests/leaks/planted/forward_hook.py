"""A hook collects the outputs of a layer for a look that nobody takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

OWNER = r"models\['main'\]\.0\._forward_hooks\[\d+\]\.outputs\[\d+\]"


class Probe:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        self.outputs.append(output)


models: dict[str, nn.Module] = {}


def program(device: str) -> Callable[[], object]:
    model = models["main"] = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(device)
    model[0].register_forward_hook(Probe())
    return lambda: model(torch.ones(32, 64, device=device))
