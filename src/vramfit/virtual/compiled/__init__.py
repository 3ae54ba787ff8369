"""Compiled programs on the virtual GPU: ``torch.compile`` as torch does it, up to the point where a card is needed.

NOTE [Compiled programs]
Nothing of the compiler is imitated. Dynamo captures the program, AOTAutograd and the min-cut partitioner decide what
the backward pass saves, Inductor lowers, fuses and writes its program of allocations, kernels and library calls: all
of it torch's own code, in the release that is installed. Only the end differs. The kernels are not built, and the
program that Inductor wrote is run on virtual tensors (see `vramfit.virtual.compiled.wrapper`), so that every buffer
is taken, reused in place and given back where the card would do it.

Why it is an estimate nevertheless, and is labelled as one:

1. What Inductor times on a card is not decided: padded matrix products (``shape_padding``) and the candidates of
   ``max-autotune`` are left out, and with them their workspaces.
2. Building and timing kernels takes memory of its own for a moment, on a card, at the first call.
3. CUDA graphs (``mode="reduce-overhead"``) are played as the same requests in a private pool (see player.py).

What cannot be compiled here runs eagerly, and a warning names why.
"""

from __future__ import annotations

import importlib
import warnings

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.op_runner import OpRunner


class Compiler:
    """torch's compiler for one virtual GPU.

    Attributes:
        outside: leaves that GPU for a while.
    """

    def __init__(self, mode: OpRunner, patches: PatchStack) -> None:
        self._mode = mode
        self._patches = patches
        self.outside = Outside()
        self._installed = False

    def install(self) -> None:
        """Let torch's compiler work here; loads it, which takes seconds, so only what compiles should call this."""
        if self._installed:
            return
        self._installed = True
        with self.outside(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of torch that others of its parts call deprecated
            load_graph_trees()
            from vramfit.virtual.compiled import dynamo, inductor
        inductor.install(self._mode, self.outside, self._patches)
        dynamo.install(self._mode, self.outside, self._patches)


def load_graph_trees() -> None:
    """Load what `torch._dynamo.reset` asks for as the build has it: a CPU build lacks what a card's would import."""
    with PatchStack() as patches:
        if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):
            patches.set(torch.backends.cuda, "is_built", lambda: False)
        importlib.import_module("torch._inductor.cudagraph_trees")
