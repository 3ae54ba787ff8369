"""The world of the compiler: torch without the virtual GPU's dispatch and patches, for as long as it compiles.

Compilers trace with fake tensors and modes of their own. Ours would take their ops for the program's, and a traced
function of ours would become part of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vramfit.patching import PatchStack
from vramfit.torch_internals import dispatch
from vramfit.torch_internals.autograd_engine import engine_runs
from vramfit.torch_internals.dispatch import disable_current_modes

# What `vramfit.virtual.torch_patches` replaces and a compiler may meet in a program.
_PATCHED: tuple[tuple[Any, str], ...] = (
    (nn.Module, "__call__"),
    (nn.functional, "one_hot"),
    (dispatch.nn_functions, "one_hot"),
    (torch, "ctc_loss"),
    (torch.Tensor, "as_subclass"),
    *((place.holder, place.name) for place in engine_runs),
)


class _Depth(threading.local):
    value = 0


class Outside:
    """Leaves the virtual GPU for a while, on this thread; made before the program's patches are applied."""

    def __init__(self) -> None:
        self._originals = [
            (holder, name, vars(holder)[name]) for holder, name in _PATCHED if name in vars(holder)
        ]
        self._depth = _Depth()

    @contextmanager
    def __call__(self, more: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
        """Be outside in the block; `more` names what else is bound there. A block inside another changes nothing."""
        if self._depth.value:
            yield
            return
        self._depth.value += 1
        try:
            with PatchStack() as patches, disable_current_modes():
                for holder, name, value in (*self._originals, *more):
                    patches.set(holder, name, value)
                yield
        finally:
            self._depth.value -= 1
