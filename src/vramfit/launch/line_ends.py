"""Lets what follows a program's output begin on a line of its own: a progress bar ends without one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from vramfit.patching import PatchStack

_Place = tuple[int, int, int]


class LineEnds:
    """Knows whether what this process wrote last to its standard output's file ended with a line.

    It hears what goes through `sys.stdout` and `sys.stderr`, however often a program replaces them by something that
    writes there in the end; not what compiled code writes, nor other processes.

    Args:
        patches: undone when the program has ended.
    """

    def __init__(self, patches: PatchStack) -> None:
        self._output = sys.stdout
        self._place = _place(self._output)
        self._open = False
        self._write: Callable[[str], int] | None = None
        for stream in (sys.stdout, sys.stderr):
            if self._place is not None and _place(stream) == self._place:
                self._listen(stream, patches)

    def _listen(self, stream: TextIO, patches: PatchStack) -> None:
        original = stream.write

        def write(text: Any, /) -> int:
            count = original(text)
            if text:
                self._open = text[-1] != "\n"
            return count

        if stream is self._output:
            self._write = original
        # A stream of another type may have no attributes of its own.
        with contextlib.suppress(AttributeError, TypeError):
            patches.supply(stream, "write", write)

    def end(self) -> None:
        """End the line, if one is open."""
        if not self._open or self._write is None:
            return
        self._open = False
        with contextlib.suppress(OSError, ValueError):  # it was closed
            self._write("\n")
            self._output.flush()


def _place(stream: TextIO | None) -> _Place | None:
    """What identifies the file behind a stream; None for one without a file."""
    try:
        found = os.fstat(stream.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_rdev
