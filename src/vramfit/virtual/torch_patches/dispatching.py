"""A shorter way from torch's dispatcher to our mode."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._library import simple_registry

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner

_Find = Callable[[Any, type], Callable[..., Any] | None]


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Answer at once that no library has a rule of its own (``torch.library.register_torch_dispatch``) for our mode.

    Before torch hands an op or a question for a device to a mode (``torch/csrc/autograd/python_variable.cpp``), it
    looks by name in Python whether there is such a rule for the mode's class. Nobody can have made one for ours; for
    any other class the look-up is torch's.

    The function is changed rather than replaced: torch keeps the one that it has found at the first op under any mode.
    """
    found: Any = simple_registry.find_torch_dispatch_rule
    code, defaults = found.__code__, found.__defaults__
    our_class: type = type(mode)
    torchs: _Find = FunctionType(code, found.__globals__)

    def find(
        op: Any, torch_dispatch_class: type, ours: type = our_class, original: _Find = torchs
    ) -> Callable[..., Any] | None:
        return None if torch_dispatch_class is ours else original(op, torch_dispatch_class)

    def undo() -> None:
        found.__code__, found.__defaults__ = code, defaults

    patches.call(undo)
    found.__defaults__, found.__code__ = find.__defaults__, find.__code__
