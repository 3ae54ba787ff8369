"""Keeps the best weights so far, and all the ones before, on the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

OWNER = r"best\[\d+\]\['(weight|bias)'\]$"
best: list[dict[str, Tensor]] = []


def program(device: str) -> Callable[[], object]:
    model = nn.Linear(64, 64).to(device)

    def validate() -> None:
        best.append({name: value.clone() for name, value in model.state_dict().items()})

    return validate
