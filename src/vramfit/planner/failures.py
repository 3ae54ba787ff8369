"""What went wrong with a workload, in one line: the message, the place in the user's file, and what to do about it."""

from __future__ import annotations

import re
import traceback
from typing import Any

from vramfit.errors import VramfitError
from vramfit.launch.job import Failure
from vramfit.plain import to_plain

_MOST = 200
"""Characters of a message: torch lists every backend that it has in one line."""

_NO_CARD = re.compile(
    r"Could not run '\S+' with arguments from the 'CUDA' backend"
    r"|Torch not compiled with CUDA enabled"
    r"|Found no NVIDIA driver"
    r"|No CUDA GPUs are available"
)
_MIXED = re.compile(r"[Ee]xpected all tensors to be on the same device|is not on the expected device")


def told(error: Exception, target: str) -> dict[str, Any]:
    """An error as the plain values of a `Failure`, and what was found all the same.

    Args:
        error: raised on purpose, or by the workload's own code.
        target: the workload, as ``FILE.py:NAME``.
    """
    if not isinstance(error, VramfitError):
        return workload_failure(error, target)
    found: dict[str, Any] = getattr(error, "found", {})
    return {**to_plain(Failure.of(error)), **found}


def workload_failure(error: Exception, target: str) -> dict[str, Any]:
    """What is told of an error of the workload's own.

    Args:
        error: with its traceback.
        target: the workload, as ``FILE.py:NAME``.
    """
    file = target.rpartition(":")[0]
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)
    ]
    where = f"{file}:{lines[-1]}: " if lines else ""
    text = (str(error).splitlines() or [""])[0]
    if found := _NO_CARD.search(text):
        return {
            "message": f"{where}a tensor is made on a card, outside of the run on one ({found[0]})",
            "hint": "Make model and batches on the CPU: they are moved to the device",
            "code": 2,
        }
    if _MIXED.search(text):
        return {
            "message": f"{where}tensors on different devices meet ({_short(text)})",
            "hint": "Model and batch are moved to the device: let the model hold its other tensors as buffers, and "
            "make new ones on the device of its inputs",
            "code": 2,
        }
    return {
        "message": f"{where}{brief(error)}",
        "hint": "The workload itself fails: run one step of it on its own to see more",
        "code": 1,
    }


def brief(error: Exception) -> str:
    """An error's kind and the first line of its message."""
    return f"{type(error).__name__}: {_short((str(error).splitlines() or [''])[0])}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
