"""Starts processes: the one place where vramfit does, for child interpreters and for tools such as nvidia-smi."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramfit.errors import UsageError


def python_command(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command line of a module of ours, as for ``python -m``, in an interpreter with these options."""
    # -P: the current folder must not shadow our own imports.
    return [sys.executable, *options, "-P", "-m", module, *arguments]


def own_options() -> list[str]:
    """Options of this interpreter (``-W``, ``-O``, ``-X``), which a program run in it would have had."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process by its command line; the options are those of ``subprocess.Popen``.

    Raises:
        UsageError: the process cannot be started.
    """
    with explained(arguments[0]):
        return subprocess.Popen(arguments, **options)


def call(arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
    """Run a process to its end, with the input and output of this one; its exit code, negative for a signal.

    Raises:
        UsageError: the process cannot be started.
    """
    with explained(arguments[0]):
        return subprocess.run(arguments, env=env, check=False).returncode


def answer(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end and keep what it writes to its standard output and standard error.

    Raises:
        OSError: the process cannot be started.
        subprocess.TimeoutExpired: the process took longer than `timeout` seconds, and was killed.
    """
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        stdin=stdin,
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Say in one line why a process could not be started: its folder is gone, or its interpreter may not be run."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where = f" ({error.filename})" if error.filename and str(error.filename) != name else ""
        raise UsageError(
            f"cannot start {name}: {reason}{where}",
            "Check that you may run it, and that there are memory and processes left",
        ) from error
