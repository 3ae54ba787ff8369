"""Kernels that are not torch's: Triton, C++ and CUDA extensions, operators that the program registers.

NOTE [What is done about foreign kernels]
No kernel of the program runs: there is no card, and a virtual tensor has no memory that one could read. What a kernel
means for memory follows from what surrounds it:

- A Triton kernel writes tensors that its caller allocated. A launch is noted, and the values that it writes, which are
  read from the kernel's source, are unknown from then on (triton_runtime.py).
- An operator that is written in Python (``torch.library.custom_op``, ``triton_op``) runs as it is, on virtual tensors,
  unless its author described it by ``register_fake`` (foreign_calls.py).
- Compiled functions have a stand-in from the user: Python that allocates what the kernel does (fake_kernels.py,
  foreign_calls.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramfit.patching import PatchStack

if TYPE_CHECKING:  # the command line asks this package for its names, and loads no torch
    from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Stand in for foreign kernels, those of modules that are imported later too, until the patches are undone.

    Raises:
        UsageError: the user's file of stand-ins is not there, or fails.
    """
    from vramfit.virtual.foreign import fake_kernels, foreign_calls, triton_runtime

    fake_kernels.load()
    for module in (foreign_calls, triton_runtime):
        module.install(mode, patches)
