"""Kernels that are not torch's: Triton, C++ and CUDA extensions, operators that the program registers.

NOTE [What is done about foreign kernels]
No kernel of the program runs: there is no card, and a virtual tensor has no memory that one could read. What it means
for memory is told by what surrounds it:

- A Triton kernel writes tensors that its caller allocated. A launch is noted, and what it writes has no known values
  from then on (triton_launches.py; written.py reads from the kernel's source what that is).
- An operator that is written in Python (``torch.library.custom_op``, ``triton_op``) runs as it is, on virtual tensors,
  unless its author described it by ``register_fake`` (operators.py).
- Compiled functions have a stand-in from the user: Python that allocates what the kernel does (fake_kernels.py,
  functions.py).
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
    from vramfit.virtual.foreign import fake_kernels, functions, triton_driver, triton_launches

    fake_kernels.load()
    for module in (functions, triton_driver, triton_launches):
        module.install(mode, patches)
