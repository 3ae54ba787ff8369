"""torch's own shared libraries, and what is done to memory that they share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

Undo = Callable[[], None]


def library(stem: str) -> ctypes.CDLL:
    """One of the libraries that torch brings.

    Raises:
        OSError: it is not there under a name that we know.
    """
    folder = Path(torch.__file__).parent / "lib"
    for name in (f"lib{stem}.so", f"lib{stem}.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise OSError(f"no lib{stem} beside torch")


def pointer_at(address: int) -> int:
    """The pointer that stands at an address."""
    return ctypes.c_void_p.from_address(address).value or 0


def put(where: ctypes.c_void_p, pointer: int | None) -> Undo:
    """Write a pointer, and give what writes the former one back."""
    before = where.value

    def undo() -> None:
        where.value = before

    where.value = pointer
    return undo
