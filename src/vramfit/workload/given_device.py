"""A device that a user names, checked where it comes in."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.arguments import shown
from vramfit.errors import UsageError


def device_argument(name: str, given: Any) -> torch.device:
    """The CPU, or a card by its number.

    Args:
        given: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a `torch.device`.

    Raises:
        UsageError: it is no device, one of another kind, or there is no such card here.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise UsageError(f"{name}={shown(given)} is no device", 'Give "cuda", "cuda:1" or "cpu"') from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(
            f"{name}={shown(given)} is neither a CUDA device nor the CPU", 'Give "cuda", "cuda:1" or "cpu"'
        )
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", f'Give {name}="cpu", or use a VirtualGPU')
    index: int | None = device.index  # torch's stub says that there is always one
    if index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {device}", f"There are {torch.cuda.device_count()}: cuda:0 is the first"
        )
    return device


def device_or_default(name: str, given: Any) -> torch.device:
    """As `device_argument`; None is the current card where there is one, and the CPU elsewhere.

    Raises:
        UsageError: as of `device_argument`.
    """
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    return device_argument(name, given)
