"""Compiled programs on the virtual GPU: ``torch.compile`` as torch does it, up to the point where a card is needed.

NOTE [Compiled programs]
Nothing of the compiler is imitated. Dynamo captures the program, AOTAutograd and the min-cut partitioner decide what
the backward pass saves, Inductor lowers, fuses and writes its program of allocations, kernels and library calls: all
of it torch's own code, in the release that is installed. Only the end differs. The kernels are not built, and the
program that Inductor wrote is run on virtual tensors (see `vramfit.virtual.compiled.wrapper`), so that every buffer
is taken, reused in place and given back where the card would do it.

Why it is an estimate nevertheless, and is labelled as one:

1. What Inductor times on a card is not decided. Padded matrix products are tried, which takes memory, and not chosen
   (see padding.py); the candidates of ``max-autotune`` are left out, and with them their workspaces.
2. Timing kernels takes memory of its own for a moment, on a card, at the first call: clones of what they change in
   place. torch sees to it that the peak of allocated bytes does not grow by them; that of reserved bytes may.
3. CUDA graphs (``mode="reduce-overhead"``) are played as the same requests in a private pool (see player.py).

How far the peaks may be off, recorded programs tell (NOTE [Programs that were compiled]).

What cannot be compiled here runs eagerly, and a warning names why.
"""

from __future__ import annotations

import importlib
import warnings

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.compiler_parts import GRAPH_TREES, allocator_state
from vramfit.torch_internals.names import Feature, attempt
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.op_runner import OpRunner

_FEATURE = Feature("compiled programs")


class Compiler:
    """torch's compiler for one virtual GPU.

    Attributes:
        outside: leaves that GPU for a while.
        works: whether this torch has what it needs; without it programs run as they would uncompiled.
    """

    def __init__(self, mode: OpRunner, patches: PatchStack) -> None:
        self._mode = mode
        self._patches = patches
        self.outside = Outside()
        self._installed = False
        self.works = True

    def install(self) -> None:
        """Let torch's compiler work here; loads it, which takes seconds, so only what compiles should call this."""
        if self._installed:
            return
        self._installed = True
        self.works = bool(attempt(_FEATURE, self._patches, self._install))

    def _install(self, patches: PatchStack) -> bool:
        with self.outside(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of torch that others of its parts call deprecated
            load_graph_trees()
            from vramfit.virtual.compiled import dynamo, inductor
        inductor.install(self._mode, self.outside, patches)
        dynamo.install(self._mode, self.outside, patches)
        return True


def load_graph_trees() -> None:
    """Load what `torch._dynamo.reset` asks for as the build has it: a CPU build lacks what a card's would import."""
    with PatchStack() as patches:
        if not allocator_state.exists:
            patches.set(torch.backends.cuda, "is_built", lambda: False)
        importlib.import_module(GRAPH_TREES)
