"""Stand-ins that the user gives for compiled kernels: ``vramfit.fake_kernel``, and files of them. No torch."""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vramfit.arguments import shown, text_argument
from vramfit.errors import UsageError
from vramfit.options.run_options import KERNELS_VARIABLE

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeKernel:
    """A stand-in.

    Attributes:
        name: ``package.module.function``, or ``namespace::operator`` for one of ``torch.ops``.
        function: takes the kernel's arguments; allocates and returns what it does.
        writes: names of parameters of `function` whose tensors the kernel writes.
    """

    name: str
    function: Callable[..., Any]
    writes: frozenset[str]

    @property
    def is_operator(self) -> bool:
        """Whether it stands for an operator of ``torch.ops``, not for a function of a module."""
        return "::" in self.name

    @property
    def module(self) -> str:
        """The module of the function."""
        return self.name.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """The function's name in its module."""
        return self.name.rpartition(".")[2]


KERNELS: dict[str, FakeKernel] = {}
LISTENERS: list[Callable[[FakeKernel], None]] = []
"""Called with each stand-in that is registered while a virtual GPU is there."""


def fake_kernel(name: str, *, writes: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Say what a compiled kernel allocates, so that programs that call it run on a virtual GPU.

    The decorated function is called in its place with virtual tensors. It allocates what the kernel allocates, with
    ``torch.empty`` and the like, and returns what it returns: tensors that are local to it are the kernel's scratch
    memory, given back when it returns. Nothing else is done with it: on a real card the kernel itself runs.

    >>> @vramfit.fake_kernel("selective_scan_cuda.fwd")
    ... def fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    ...     scan_states = torch.empty(*u.shape[:2], -(-u.shape[2] // 2048), A.shape[1] * 2, device=u.device)
    ...     return [torch.empty_like(delta), scan_states, *([] if z is None else [torch.empty_like(z)])]
    >>> with vramfit.VirtualGPU("RTX 4090") as gpu:
    ...     import selective_scan_cuda
    ...     u, A = torch.empty(8, 1536, 4096, device="cuda"), torch.empty(1536, 16, device="cuda")
    ...     out, scan_states = selective_scan_cuda.fwd(u, u, A, None, None, None, None, None, True)
    >>> scan_states.shape
    torch.Size([8, 1536, 2, 32])

    Args:
        name: ``package.module.function``; the module need not be installed. Or ``namespace::operator``, for an operator
            that is loaded from a library, in place of ``torch.library.register_fake`` where scratch memory matters.
        writes: names of parameters whose tensors the kernel writes: their values are unknown from then on.

    Raises:
        UsageError: the name is neither of these, or ``writes`` is not a list of names.
    """
    text_argument("name", name)
    if isinstance(writes, str | bytes) or not isinstance(writes, Iterable):
        raise UsageError(
            f"writes={shown(writes)} is not a list of names", "Give the names of parameters: writes=['out']"
        )
    written = frozenset(text_argument("writes", one) for one in writes)
    parts = name.split("::") if "::" in name else name.rsplit(".", 1)
    if len(parts) != 2 or not all(part.replace(".", "_").isidentifier() for part in parts):
        raise UsageError(
            f"{name!r} names no kernel",
            "Give package.module.function, or namespace::operator for one of torch.ops",
        )
    if parts[0] in ("aten", "prims", "torch") or parts[0].startswith("torch."):
        raise UsageError(f"{name!r} is torch's own", "fake_kernel is for kernels of others")

    def register(function: Function) -> Function:
        kernel = FakeKernel(name=name, function=function, writes=written)
        KERNELS[name] = kernel
        for hear in LISTENERS:
            hear(kernel)
        return function

    return register


# -- A file of stand-ins that the user names: ``--kernels FILE``, or ``VRAMFIT_KERNELS`` ---------------------


_loaded: set[Path] = set()


def load() -> None:
    """Run the file that the environment names, once in a process: it registers stand-ins.

    Raises:
        UsageError: there is no such file, or it fails; the message has the error and its line.
    """
    named = os.environ.get(KERNELS_VARIABLE)
    if not named or Path(named).resolve() in _loaded:
        return
    path = Path(named).resolve()
    if not path.is_file():
        raise UsageError(
            f"there is no file {named}", f"--kernels and {KERNELS_VARIABLE} name a Python file of stand-ins"
        )
    _loaded.add(path)
    try:
        runpy.run_path(str(path))
    except UsageError:
        raise
    except Exception as error:  # the file is the user's, and so is whatever it raises
        line = next((f.lineno for f in _frames(error) if Path(f.filename) == path), None)
        at = "" if line is None else f", line {line}"
        raise UsageError(
            f"{named}{at}: {type(error).__name__}: {error}", "Mend the file of stand-ins"
        ) from error


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(reversed(traceback.extract_tb(error.__traceback__)))
