"""Requests and their replies refer to each other, in a program that holds the collector off."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

OWNER = r"^dead reference cycle of .*reference_cycle\.Re(quest|ply).*\.batch$"


class Reply:
    def __init__(self, request: Request) -> None:
        self.request = request


class Request:
    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.reply = Reply(self)


def program(device: str) -> Callable[[], object]:
    gc.disable()

    def serve() -> None:
        Request(torch.ones(64, 64, device=device))

    return serve
