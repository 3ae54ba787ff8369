"""Runs a program inside of this process, again and again, as if each time were the first.

It reads an empty input, prints to nobody, and reaches no other machine (launch/offline.py): what it sends, it would
send as often as it is run. What it leaves behind is taken away after each run: its ``__main__``, the modules that it
imported from its own folder, its arguments and paths, process groups, and the state of accelerate. Libraries stay
imported, which is what makes a second run quick. Whether a run after others takes the same memory as one in a process
of its own is not taken for granted: a plan is confirmed by such a one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from vramfit.launch.running import become
from vramfit.patching import PatchStack
from vramfit.planner.scripts.script_steps import EnoughSteps
from vramfit.trace.frames import Origin, origin

PLANNING = "VRAMFIT_PLANNING"
"""Variable that a program finds while it is planned for."""


def run_here(command: Sequence[str], sources: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Run a program to its end, or until `EnoughSteps`.

    Args:
        command: what python is given.
        sources: another text of its script, by the absolute path.

    Raises:
        BaseException: what the program raised; a ``SystemExit`` only where it says that it failed.
    """
    with _undone(), _silent():
        try:
            become(list(command), sources)
        except EnoughSteps:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            _let_go()


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Leave the interpreter as it was."""
    arguments, path, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    os.environ[PLANNING] = "1"
    modules, folder, environ = set(sys.modules), os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        left = sys.modules.get("__main__")
        if left is not None and left is not main:
            left.__dict__.clear()
        sys.argv, sys.path[:] = arguments, path
        if main is not None:
            sys.modules["__main__"] = main
        for name in set(sys.modules) - modules:
            if _is_own(sys.modules[name]):
                del sys.modules[name]
        os.chdir(folder)
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        os.environ.update(environ)
        gc.collect()


def _is_own(module: Any) -> bool:
    """Whether a module is the program's."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and origin(file) is Origin.USER


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what the program prints, and give it an empty input."""
    with (
        open(os.devnull, encoding="utf-8") as nothing,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        PatchStack() as patches,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        patches.set(sys, "stdin", nothing)
        yield


def _let_go() -> None:
    """End what outlives a program's own names."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    state = sys.modules.get("accelerate.state")
    for name in ("AcceleratorState", "GradientState", "PartialState"):
        reset = getattr(getattr(state, name, None), "_reset_state", None)
        if reset is not None:
            with contextlib.suppress(Exception):
                reset()
