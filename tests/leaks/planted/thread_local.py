"""Scratch tensors pile up in the state of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

OWNER = r"scratch\.tensors\[\d+\]"
scratch = threading.local()


def program(device: str) -> Callable[[], object]:
    scratch.tensors = []
    return lambda: scratch.tensors.append(torch.ones(64, 64, device=device))
