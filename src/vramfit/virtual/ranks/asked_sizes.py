"""Says where a program depends on sizes of other ranks: counts that it exchanges, parts that it sends unevenly.

They are taken to equal this rank's (peer_values.py), which is right for batches of one size and wrong for ragged ones
and for tokens that a router sends to experts. What torch itself exchanges (DDP the shapes of parameters, functions for
objects their lengths) is the same on all ranks, and not told.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import FrameType

import torch

from vramfit.virtual.data_dependent.expectations import WATCHED
from vramfit.virtual.data_dependent.shadow import MAX_ELEMENTS
from vramfit.virtual.op_runner import OpRunner

CODE = "sizes-of-other-ranks"
_PASSED = frozenset(
    {"distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "_ops.py", "autograd.py"}
)
"""Files of torch between a program and a collective that it calls; the last is that of ``torch/_library``."""
_OURS = str(PurePath(__file__).parents[2])
_TORCH = str(PurePath(torch.__file__).parent)


class AskedSizes:
    """Warns of the places, once each."""

    def __init__(self, mode: OpRunner) -> None:
        self._mode = mode

    def uneven(self, splits: list[int]) -> None:
        """Note an all-to-all whose parts are of several sizes."""
        if len(set(splits)) > 1:
            self._tell("parts of several sizes are exchanged: those that other ranks send")

    def counts(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Note whole numbers that a program gathers or reduces itself."""
        counting = any(t.dtype in WATCHED and t.dtype is not torch.bool and few(t) for t in tensors)
        if counting and by_program():
            self._tell(f"this {what} is of whole numbers: those of other ranks")

    def _tell(self, what: str) -> None:
        self._mode.machine.warn(
            CODE, f"{what} are taken to equal this rank's", location=self._mode.guesses.location() or None
        )


def few(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough that its numbers are followed, and holds no pickled object."""
    return tensor.dtype is not torch.uint8 and tensor.numel() <= MAX_ELEMENTS


def by_program() -> bool:
    """Whether the innermost frame beside ours and those of torch's functions for collectives is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            if not code.co_filename.startswith(_TORCH):
                return True
            if PurePath(code.co_filename).name not in _PASSED or "object" in code.co_name:
                return False
        frame = frame.f_back
    return False
