"""A shorter way from torch's dispatcher to our mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._library import simple_registry

from vramfit.programs.patching import PatchStack

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode

_Find = Callable[[Any, type], Callable[..., Any] | None]


def install(mode: VirtualMode, patches: PatchStack) -> None:
    """Answer at once that no library has a rule of its own (``torch.library.register_torch_dispatch``) for our mode.

    Before torch hands an op or a question for a device to a mode (``torch/csrc/autograd/python_variable.cpp``), it
    looks by name in Python whether there is such a rule for the mode's class. Nobody can have made one for ours; for
    any other class the look-up is torch's.
    """
    ours = type(mode)
    original: _Find = simple_registry.find_torch_dispatch_rule

    def find(op: Any, torch_dispatch_class: type) -> Callable[..., Any] | None:
        return None if torch_dispatch_class is ours else original(op, torch_dispatch_class)

    patches.set(simple_registry, "find_torch_dispatch_rule", find)
