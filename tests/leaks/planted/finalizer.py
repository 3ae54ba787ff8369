"""Gives each batch to the finalizer of an object that never goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"weakref\.finalize\._registry\[<weakref\.finalize>\]\.args\[0\]"


class Session:
    pass


session = Session()


def release(batch: Tensor) -> None:
    del batch


def program(device: str) -> Callable[[], object]:
    def serve() -> None:
        weakref.finalize(session, release, torch.ones(64, 64, device=device))

    return serve
