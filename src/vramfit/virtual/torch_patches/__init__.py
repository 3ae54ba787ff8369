"""Patches of torch outside ``torch.cuda`` that let an unmodified program run on fake tensors.

Each module patches one part of torch; `install` applies them all to a `PatchStack`, which undoes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch

from vramfit.launch import threads
from vramfit.patching import PatchStack, after_import
from vramfit.torch_internals.compiler_parts import DYNAMO
from vramfit.torch_internals.custom_ops import simple_registry
from vramfit.torch_internals.names import Feature, attempt
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

_COMPILE = Feature("compiled programs")
_DISPATCH = Feature("a shorter way through the dispatcher")
_PARTS: dict[Feature, Any] = {
    Feature("values, addresses and text of virtual tensors"): tensors,
    Feature("parameters that keep their identity"): identity,
    Feature("modules on the virtual card"): modules,
    Feature("phases of a step, gradients and optimizer states by name"): training_steps,
    Feature("torch.save and torch.load of virtual tensors"): checkpoints,
    Feature("distributed checkpoints in folders of their own"): checkpoint_folders,
    Feature("checkpoints that are staged on the host"): staged_checkpoints,
    Feature("threads of the program"): threads,
    Feature("functions that take another way on a card"): card_routes,
    Feature("torch.jit and torch.fx"): tracing,
    Feature("other libraries on the virtual card"): libraries,
}
"""Each group of patches by what it is for, in order."""

_Find = Callable[[Any, type], Callable[..., Any] | None]


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Apply every patch of this package."""
    attempt(
        _COMPILE, patches, partial(_patch_compile, mode, patches)
    )  # first: it keeps what the others replace
    attempt(_DISPATCH, patches, partial(_shorten_dispatch, mode))
    for feature, module in _PARTS.items():
        attempt(feature, patches, partial(module.install, mode))


def _patch_compile(mode: OpRunner, later: PatchStack, patches: PatchStack) -> None:
    """Make torch's own compiler work on the virtual GPU before a program first uses it.

    Args:
        later: takes what is patched at that first use.
    """
    original = torch.compile
    compiler = Compiler(mode, later)

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        compiler.install()
        return original(*args, **kwargs if compiler.works else {**kwargs, "disable": True})

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

    after_import({DYNAMO: resettable}, patches)


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
