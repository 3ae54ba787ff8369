"""The standard streams of the command line: a reader that goes away ends nothing; a full disk is reported last."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vramfit.cli.printing import STANDARD_OUTPUT
from vramfit.writing import refused


class GuardedStream:
    """A text stream that falls silent when it can no longer be written to.

    What remains to be done is done all the same: files that were asked for are written, and the exit code is what it
    would have been.

    Args:
        stream: the stream; all that is not about writing is its own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """Why it fell silent; None where it did not."""

    def write(self, text: str) -> int:
        """Write, or pretend to."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._fall_silent(error)
        except UnicodeEncodeError:  # a name of a file that is no text, or a terminal of another encoding
            encoding = self._stream.encoding or "ascii"
            self.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is kept back."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fall_silent(error)

    def _fall_silent(self, error: OSError) -> None:
        """Let what is still to come, what the interpreter flushes at its exit too, go nowhere."""
        self.failure = self.failure or error
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def check(self) -> None:
        """Tell of a stream that could not be written to, now that all else is done.

        Raises:
            WriteError: the disk is full, for one. That nobody reads any more is no error.
        """
        self.flush()
        if self.failure is not None and not isinstance(self.failure, BrokenPipeError):
            raise refused("standard output", self.failure) from self.failure


@contextlib.contextmanager
def guarded_streams() -> Iterator[GuardedStream]:
    """Guard standard output, which is given, and standard error; those that the shell closed lead nowhere."""
    with _streams_for_closed_ones():
        out, err = sys.stdout, sys.stderr
        guarded = GuardedStream(out)
        sys.stdout, sys.stderr = guarded, GuardedStream(err)
        try:
            yield guarded
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = out, err


@contextlib.contextmanager
def _streams_for_closed_ones() -> Iterator[None]:
    """Open the null device in place of standard streams that are closed, for our children too.

    The next file that is opened would otherwise get the number of such a stream, and what is printed there would be
    written into it.
    """
    with contextlib.ExitStack() as opened:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is not None:
                continue
            nowhere = os.open(
                os.devnull, os.O_RDWR
            )  # the lowest number that is free: this one, unless it was taken
            os.set_inheritable(nowhere, nowhere == number)
            stream = opened.enter_context(os.fdopen(nowhere, "w" if number else "r", encoding="utf-8"))
            opened.callback(setattr, sys, name, None)
            setattr(sys, name, stream)
        yield


@contextlib.contextmanager
def apart_from_json(json: Path | None) -> Iterator[None]:
    """Send what the program prints to standard error where standard output shall hold nothing but JSON."""
    if json != STANDARD_OUTPUT:
        yield
        return
    sys.stdout.flush()
    # The child inherits the descriptors, so that is where its output must be turned.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
