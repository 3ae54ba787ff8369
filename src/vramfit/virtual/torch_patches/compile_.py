"""``torch.compile``: torch's own compiler, made to work on the virtual GPU before it is first used."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.compiled import Compiler

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode


def install(mode: VirtualMode, patches: PatchStack) -> None:
    """Prepare the compiler when a program asks for it; apply before other patches, which it must see through."""
    original = torch.compile
    compiler = Compiler(mode, patches)

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiler.install()
        return original(*args, **kwargs)

    patches.set(torch, "compile", compile)
