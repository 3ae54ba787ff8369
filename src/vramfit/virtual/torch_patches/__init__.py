"""Patches of torch outside ``torch.cuda`` that let an unmodified program run on fake tensors.

Each module patches one thing; `install` applies them all to a `PatchStack`, which undoes them.
"""

from __future__ import annotations

from vramfit.launch import threads
from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner
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


def install(mode: OpRunner, patches: PatchStack) -> None:
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
