"""What could only act on a real card: refused by name, so that no build reaches the CUDA runtime through it."""

# ruff: noqa: ARG001  # the signatures are those of the C functions

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from vramfit.patching import PatchStack
from vramfit.torch_internals import real_card
from vramfit.virtual.torch_cuda.base import C, CFunctions

_UNIQUE_ID_BYTES = 128  # nccl.h, NCCL_UNIQUE_ID_BYTES

_REASONS = {
    "_cuda_jiterator_compile_and_launch_kernel": "torch.cuda.jiterator compiles CUDA code, which the virtual GPU "
    "cannot run",
    **dict.fromkeys(
        real_card.NCCL_CALLS,
        "torch.cuda.nccl calls NCCL itself, which needs real cards; torch.distributed and torch.cuda.comm run on "
        "virtual ones",
    ),
    **dict.fromkeys(
        real_card.DIRECT_STORAGE,
        "torch.cuda.gds moves bytes between files and a real card; a virtual one holds none",
    ),
    **dict.fromkeys(
        real_card.POOL_CHECKPOINTS,
        "a checkpoint of a memory pool is of CUDA graphs that torch.compile replays, which the virtual GPU does not",
    ),
}


def _refusal(reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"vramfit: {reason}")

    return refuse


class RefusedFunctions(CFunctions):
    """Functions of ``torch._C`` that need a real card."""

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``."""
        return super().functions() | {name: _refusal(reason) for name, reason in _REASONS.items()}

    def _nccl_unique_id(self) -> bytes:
        # Made by NCCL for its own network; nobody else knows of it here.
        return os.urandom(_UNIQUE_ID_BYTES)


def patch_refused(patches: PatchStack) -> None:
    """Refuse what torch's Python would reach the driver by: its compiler of CUDA code, and contexts."""
    compiles = _refusal("torch.cuda compiles CUDA code here, which the virtual GPU cannot run")
    for name in real_card.LIBRARIES_OF_COMPILED_CODE:
        if hasattr(real_card.utilities, name):
            patches.set(real_card.utilities, name, compiles)
    if real_card.GREEN_CONTEXT in vars(C):
        own = getattr(C, real_card.GREEN_CONTEXT)
        patches.supply(C, real_card.GREEN_CONTEXT, GreenContext)
        patches.rebind([(own, GreenContext)])


class GreenContext:
    """Stands for ``torch._C._CUDAGreenContext`` (until 2.13; later ones are made through cuda.bindings)."""

    create = staticmethod(_refusal("a green context takes a part of a real card's processors"))


def refuse_symmetric_memory(memory: Any, patches: PatchStack) -> None:
    """Refuse what only real cards can share, by the class ``torch._C._distributed_c10d._SymmetricMemory``."""
    refuse = staticmethod(_refusal("symmetric memory is mapped between real cards"))
    for name in real_card.SYMMETRIC_MEMORY:
        if hasattr(memory, name):
            patches.set(memory, name, refuse)
    patches.set(memory, "has_multicast_support", staticmethod(_has_none))


def _has_none(*args: object, **kwargs: object) -> bool:
    """Whether cards have what symmetric memory asks for: virtual ones have not."""
    return False
