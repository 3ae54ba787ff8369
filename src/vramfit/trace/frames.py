"""Distinguishes the user's source lines from those of Python, torch and other libraries, by file name alone."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from vramfit.trace.model import Frame


class Origin(IntEnum):
    """Who wrote a line, the higher the closer to the user."""

    RUNTIME = 0
    """Python's standard library, torch, vramfit itself, C++ and generated code."""
    LIBRARY = 1
    """An installed package other than torch."""
    USER = 2
    """Everything else: the program and the modules beside it."""


_OWN_PACKAGE = Path(__file__).resolve().parents[1].as_posix() + "/"
_STDLIB = tuple(
    Path(path).as_posix() + "/"
    for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    if path
)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
# An installation of another machine (the trace travelled) keeps the usual layout of the standard library.
_FOREIGN_STDLIB = re.compile(r"/lib(?:64)?/python\d+(?:\.\d+)?t?/|/python\d+\.zip/|/[Pp]ython\d+/[Ll]ib/")
# A torch built from source lies outside site-packages; these are the parts of it that show up in stacks.
_TORCH = re.compile(
    r"(?:^|/)torch/(?:_[a-z]\w*|nn/(?:modules|parallel|utils|functional\.py)|optim/|autograd/|cuda/|amp/|fx/|func/"
    r"|utils/(?:_|data/|checkpoint\.py)|distributed/|functional\.py|library\.py)"
)
_SOURCE = re.compile(r"\.(?:py|pyw|ipynb)$")
_NOTEBOOK = re.compile(r"^<(?:stdin|ipython-input|python-input)|ipykernel_\d+/")


@lru_cache(maxsize=65536)
def origin(filename: str) -> Origin:
    """Who wrote the file of that name; files of unknown origin count as the user's.

    The rules look only at the name, so that they hold for traces recorded on another machine:
    ``<frozen ...>`` and ``<string>`` are generated code, ``site-packages`` and ``dist-packages`` hold
    installed packages, and what is not Python source is C++.
    """
    name = filename.replace("\\", "/")
    if _NOTEBOOK.search(name):
        return Origin.USER
    if not _SOURCE.search(name) or name.startswith(_OWN_PACKAGE):
        return Origin.RUNTIME
    if installed := list(_INSTALLED.finditer(name)):
        package = name[installed[-1].end() :].split("/", 1)[0]
        return Origin.RUNTIME if package in {"torch", "vramfit", "functorch", "triton"} else Origin.LIBRARY
    if name.startswith(_STDLIB) or _FOREIGN_STDLIB.search(name) or _TORCH.search(name):
        return Origin.RUNTIME
    return Origin.USER


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The line that the user would look at: the innermost frame of the program's own files.

    A program that is itself an installed package (``-m package``) has no such frame; then it is the
    innermost frame of any library but torch.

    Args:
        stack: frames, innermost first.

    Returns:
        None when only Python, torch and generated code are on the stack.
    """
    return innermost(stack, Origin.USER) or innermost(stack, Origin.LIBRARY)


def innermost(stack: Iterable[Frame], least: Origin) -> Frame | None:
    """The first frame of ``stack`` (innermost first) written by ``least`` or someone closer to the user."""
    return next((frame for frame in stack if origin(frame.filename) >= least), None)


def short_location(frame: Frame | None, *, root: str | os.PathLike[str] | None = None) -> str:
    """A location as ``model.py:42``: relative to ``root`` below it, else the file's name with its folder."""
    if frame is None:
        return ""
    name = frame.filename.replace("\\", "/")
    if root is not None and name.startswith(prefix := Path(root).as_posix().rstrip("/") + "/"):
        return f"{name[len(prefix) :]}:{frame.line}"
    parts = [part for part in name.split("/") if part]
    short = "/".join(parts[-2:]) if name.startswith("/") and len(parts) > 1 else name
    return f"{short}:{frame.line}"
