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
3. CUDA graphs (``mode="reduce-overhead"``) are played as the same requests in a private pool (see `graphs`).

What cannot be compiled here runs eagerly, and a warning names why.
"""

from vramfit.virtual.compiled.compiler import Compiler

__all__ = ["Compiler"]
