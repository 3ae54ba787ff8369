"""Patches of torch outside ``torch.cuda`` that let an unmodified program run on fake tensors.

Each module patches one thing; `install` applies them all to a `PatchStack`, which undoes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramfit.launch import threads
from vramfit.patching import PatchStack
from vramfit.virtual.torch_patches import (
    attention,
    autograd,
    checkpoints,
    compile_,
    data,
    dispatching,
    libraries,
    losses,
    modules,
    one_hot,
    optimizers,
    rnn,
    storage_methods,
    subclasses,
    tensors,
    tracing,
)

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode


def install(mode: VirtualMode, patches: PatchStack) -> None:
    """Apply every patch of this package."""
    for module in (
        compile_,  # first: it keeps what the others replace
        dispatching,
        tensors,
        data,
        storage_methods,
        subclasses,
        modules,
        autograd,
        optimizers,
        checkpoints,
        threads,
        attention,
        losses,
        one_hot,
        rnn,
        tracing,
        libraries,
    ):
        module.install(mode, patches)
