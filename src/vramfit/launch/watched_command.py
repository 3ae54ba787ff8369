"""Runs a command that is watched: any program, with this process's input and output, until it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vramfit.errors import UsageError
from vramfit.launch.starting import start

_GRACE = 10.0
"""Seconds that the command has for its end after SIGTERM."""


def whole_command(words: Sequence[str]) -> list[str]:
    """A command as the system starts it: a Python script that is none of its own begins with this interpreter.

    Raises:
        UsageError: there is no such program.
    """
    first = words[0]
    if first.endswith(".py") and Path(first).is_file() and not os.access(first, os.X_OK):
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise UsageError(f"there is no command {first}", "Check its name, or write python before a script")
    return list(words)


def run_watched(
    arguments: Sequence[str], environ: Mapping[str, str], *, started: Callable[[int], object]
) -> int:
    """Run a command to its end; its exit code, 128 and the number where a signal ended it.

    An interrupt that the terminal sent has reached the command too, which decides what comes of it; one that was sent
    to this process alone is passed on.

    Args:
        arguments: the command line.
        environ: its whole environment.
        started: called with the number of its process.

    Raises:
        UsageError: it cannot be started.
    """
    with start(arguments, env=dict(environ)) as child:
        try:
            started(child.pid)
            code = _wait(child)
        except BaseException:  # a demand to end, or a failure of ours: nobody wants to wait for it
            child.terminate()
            try:
                child.wait(_GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            if not _from_terminal():
                child.send_signal(signal.SIGINT)


def _from_terminal() -> bool:
    """Whether a terminal sends its interrupts to the group of this process: then the command has got it as well."""
    for stream in (0, 1, 2):
        try:
            return os.tcgetpgrp(stream) == os.getpgrp()
        except OSError:
            continue
    return False
