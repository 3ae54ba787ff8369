"""``torch.compile``: torch's own compiler, made to work on the virtual GPU before it is first used."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.compiled import Compiler
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Prepare the compiler when a program asks for it; apply before other patches, which it must see through."""
    original = torch.compile
    compiler = Compiler(mode, patches)

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiler.install()
        return original(*args, **kwargs)

    patches.set(torch, "compile", compile)
