"""Patches of torch outside ``torch.cuda`` that let an unmodified program run on fake tensors.

Each module patches one part of torch; `install` applies them all to a `PatchStack`, which undoes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._library import simple_registry

from vramfit.launch import threads
from vramfit.patching import PatchStack, after_import
from vramfit.virtual.compiled import Compiler, load_graph_trees
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches import (
    card_routes,
    checkpoint_folders,
    checkpoints,
    exporting,
    identity,
    libraries,
    modules,
    staged_checkpoints,
    tensors,
    tracing,
    training_steps,
)

_Find = Callable[[Any, type], Callable[..., Any] | None]


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Apply every patch of this package."""
    _patch_compile(mode, patches)  # first: it keeps what the others replace
    _shorten_dispatch(mode, patches)
    for module in (
        tensors,
        identity,
        modules,
        training_steps,
        checkpoints,
        checkpoint_folders,
        staged_checkpoints,
        threads,
        card_routes,
        tracing,
        libraries,
    ):
        module.install(mode, patches)


def _patch_compile(mode: OpRunner, patches: PatchStack) -> None:
    """Make torch's own compiler work on the virtual GPU before a program first uses it."""
    original = torch.compile
    compiler = Compiler(mode, patches)

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiler.install()
        return original(*args, **kwargs)

    patches.set(torch, "compile", compile)
    exporting.install(compiler.outside, patches)

    def resettable(dynamo: ModuleType) -> None:
        reset = dynamo.reset

        @functools.wraps(reset)
        def reset_here() -> None:
            """Reset the compiler; before a first use it has not loaded what torch resets for a card."""
            load_graph_trees()
            reset()

        patches.set(dynamo, "reset", reset_here)

    after_import({"torch._dynamo": resettable}, patches)


def _shorten_dispatch(mode: OpRunner, patches: PatchStack) -> None:
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
