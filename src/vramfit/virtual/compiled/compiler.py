"""Puts torch's compiler on the virtual GPU, when a program first asks for it."""

from __future__ import annotations

import importlib
import warnings

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.op_runner import OpRunner


class Compiler:
    """torch's compiler for one virtual GPU.

    Args:
        mode: runs the compiled programs.
        patches: takes every patch with its undo.
    """

    def __init__(self, mode: OpRunner, patches: PatchStack) -> None:
        self._mode = mode
        self._patches = patches
        self._outside = Outside()
        self._installed = False

    def install(self) -> None:
        """Let torch's compiler work here; loads it, which takes seconds, so only what compiles should call this."""
        if self._installed:
            return
        self._installed = True
        with self._outside(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of torch that others of its parts call deprecated
            _load_graph_trees()
            from vramfit.virtual.compiled import dynamo, higher_order, inductor
        inductor.install(self._mode, self._outside, self._patches)
        higher_order.install(self._mode, self._outside, self._patches)
        dynamo.install(self._mode, self._outside, self._patches)


def _load_graph_trees() -> None:
    """Load what `torch._dynamo.reset` asks for as the build has it: a CPU build lacks what a card's would import."""
    with PatchStack() as patches:
        if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):
            patches.set(torch.backends.cuda, "is_built", lambda: False)
        importlib.import_module("torch._inductor.cudagraph_trees")
