"""Reads a workload from ``FILE.py:NAME``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vramfit.errors import UsageError, VramfitError
from vramfit.workload import Workload


def split_target(target: str) -> tuple[Path, str]:
    """File and name of ``FILE.py:NAME``, without running anything.

    Raises:
        UsageError: it is written otherwise, or there is no such file.
    """
    file, separator, name = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if not separator or not file or not name.isidentifier():
        raise UsageError(
            f"{target!r} names no workload", "Write it as FILE.py:NAME, the file and the variable in it"
        )
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}", "Check the path; it is relative to the current folder")
    return path, name


def load_workload(target: str) -> Workload:
    """Read ``FILE.py:NAME``: run the file as a module and take the workload of that name.

    Raises:
        UsageError: there is no such file or name, or it is no `Workload`.
        VramfitError: the file itself fails; exit code 1.
    """
    path, name = split_target(target)
    module = _run_file(path)
    if not hasattr(module, name):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, Workload))
        hint = f"It has {', '.join(known)}" if known else "Put a vramfit.Workload into it"
        raise UsageError(f"{path} has no {name}", hint)
    found = getattr(module, name)
    if not isinstance(found, Workload) and callable(found):
        found = _made(found, path, name)
    if not isinstance(found, Workload):
        raise UsageError(
            f"{name} in {path} is of type {type(found).__name__}, not a Workload",
            "Make it a vramfit.Workload, or a function without arguments that gives one",
        )
    return found


def _made(function: Callable[[], Any], path: Path, name: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise _own_failure(path, error, f"{name}()") from error


def _run_file(path: Path) -> ModuleType:
    """Run a file as python would, with its folder first on the path."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = (
        path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_workload_{path.stem}"
    )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file", "Give a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _own_failure(path, error, "the file") from error
    return module


def _own_failure(path: Path, error: Exception, what: str) -> VramfitError:
    """What the user's own code raised, with the line of theirs that did."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    if isinstance(error, SyntaxError) and error.lineno:
        where = f"{path}:{error.lineno}"
    return VramfitError(
        f"{where}: {type(error).__name__}: {error}", f"Correct {what}: python {path} shows the same"
    )
