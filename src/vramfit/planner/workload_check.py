"""What is wrong with a workload, in one line: with its batches before anything runs, or in its code when it fails."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from vramfit.errors import UsageError, VramfitError
from vramfit.failure_line import failure_line
from vramfit.launch.job import Failure
from vramfit.workload import Workload
from vramfit.workload.containers import tensors_in


def check_workload(
    workload: Workload, sizes: Mapping[str, int], progress: Callable[[str], None] = lambda _text: None
) -> None:
    """Make sure that a workload's batches follow its sizes and lie on the CPU.

    Its model and loss are looked at where they first run: `AttachedProgram.weighted` refuses a
    loss that is no scalar, for plain workloads too.

    Raises:
        UsageError: the batch function fails, ignores a size, or makes its batch on a card.
    """
    progress("the workload's batches")
    batch = _made(workload, sizes)
    for tensor in tensors_in(batch):
        if tensor.device.type != "cpu":
            raise UsageError(
                f"batch makes a tensor on {tensor.device}",
                "Make batches on the CPU: they are moved to the device",
            )
    shapes = _shapes(batch)
    for name, value in sizes.items():
        other = _made(workload, {**sizes, name: value + 1})
        if _shapes(other) == shapes:
            raise UsageError(
                f"batch ignores its size {name}: {value} and {value + 1} give the same shapes {_words(shapes)}",
                f"Use {name} in batch, or take it out of sizes",
            )


def _made(workload: Workload, sizes: Mapping[str, int]) -> Any:
    words = ", ".join(f"{name}={value}" for name, value in sizes.items())
    try:
        batch = workload.batch(**sizes)
    except TypeError as error:
        raise UsageError(
            f"batch({words}) fails: {error}", "Let its arguments be the names in sizes"
        ) from error
    if next(tensors_in(batch), None) is None:
        raise UsageError(
            f"batch({words}) gives no tensor but {type(batch).__name__}",
            "Let it return a tensor, or a tuple or dict",
        )
    return batch


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_in(batch)]


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


_MOST = 200
"""Characters of a message: torch lists every backend that it has in one line."""

_NO_CARD = re.compile(
    r"Could not run '\S+' with arguments from the 'CUDA' backend"
    r"|Torch not compiled with CUDA enabled"
    r"|Found no NVIDIA driver"
    r"|No CUDA GPUs are available"
)
_MIXED = re.compile(r"[Ee]xpected all tensors to be on the same device|is not on the expected device")


def failure_of_task(error: Exception, target: str) -> Failure:
    """An error on its way to the parent, with what was found all the same."""
    if not isinstance(error, VramfitError):
        return workload_failure(error, target)
    return Failure.of(error)


_TRANSFORMS = "don't yet support saved tensor hooks"
"""In what torch.func says (torch/csrc/autograd/functions/utils) where saved tensors are watched."""


def workload_failure(error: Exception, target: str) -> Failure:
    """An error of the workload's own: the message, its place in the user's file, and what to do."""
    file = target.rpartition(":")[0]
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)
    ]
    where = f"{file}:{lines[-1]}: " if lines else ""
    text = (str(error).splitlines() or [""])[0]
    if found := _NO_CARD.search(text):
        return Failure(
            message=f"{where}a tensor is made on a card, outside of the run on one ({found[0]})",
            hint="Make model and batches on the CPU: they are moved to the device",
            code=2,
        )
    if _MIXED.search(text):
        return Failure(
            message=f"{where}tensors on different devices meet ({_short(text)})",
            hint="Model and batch are moved to the device: let the model hold its other tensors as buffers, and "
            "make new ones on the device of its inputs",
            code=2,
        )
    if _TRANSFORMS in text:
        return Failure(
            message=f"{where}a gradient by torch.func inside the step: what it saves cannot be followed, and no plan "
            "can be made of it",
            hint="Use torch.autograd.grad(..., create_graph=True) there, which can",
            code=2,
        )
    return Failure(
        message=f"{where}{brief(error)}",
        hint="The workload itself fails: run one step of it on its own to see more",
        code=1,
    )


def brief(error: BaseException) -> str:
    """Why a workload failed, in one line that is not too long."""
    return _short(failure_line(error))


def _short(text: str) -> str:
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
