"""What the command line prints and writes, and the standard streams that it goes to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from vramfit import __version__
from vramfit.errors import UsageError, VramfitError
from vramfit.launch.interrupts import INTERRUPTED
from vramfit.writing import refused

if TYPE_CHECKING:
    from rich.console import Console


STANDARD_OUTPUT = Path("-")
"""What ``--json -`` names."""
INTERNAL_ERROR = 70
"""Exit code of a bug in vramfit (EX_SOFTWARE of sysexits.h), distinct from the program's own failure."""
_WIDTH = 110
"""Columns where nobody says how many there are, as in a file."""


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as COLUMNS says; elsewhere 110 columns."""
    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=stderr, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return SafeConsole(stderr=stderr, highlight=False, width=_WIDTH)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, indented, whole or not at all; ``-`` is standard output.

    Raises:
        WriteError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    from vramfit.report import write_text

    write_text(path, text)


def print_result(path: Path | None, render: Callable[[], str], show: Callable[[], object]) -> None:
    """Print a result, and write it as JSON if requested; JSON on standard output replaces what is printed.

    Raises:
        WriteError: the file cannot be written.
    """
    if path == STANDARD_OUTPUT:
        typer.echo(render(), nl=False)
        return
    show()
    if path is not None:
        from vramfit.writing import write_text

        write_text(path, render())


def check_outputs(outputs: Iterable[tuple[str, Path | None]]) -> None:
    """Find a file that cannot be written before minutes of work.

    Args:
        outputs: each option with what it names; ``-`` is standard output for ``--json`` alone.

    Raises:
        UsageError: two options name the same file.
        WriteError: a file cannot be written.
    """
    from vramfit.writing import check_writable

    seen: set[Path] = set()
    for option, path in outputs:
        if path is None or (option == "--json" and path == STANDARD_OUTPUT):
            continue
        if path.absolute() in seen:
            raise UsageError(
                f"{option} names {path}, which another option names too", "Give each its own file"
            )
        seen.add(path.absolute())
        check_writable(path)


@contextlib.contextmanager
def showing() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is going on; gone at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=True)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


def print_error(error: VramfitError) -> None:
    """Print what is wrong and what to do next."""
    from rich.text import Text

    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), _one_line(error.message)), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("next:  ", "bold"), _one_line(error.hint)), soft_wrap=True)


def interrupted(when: str = "before the program began") -> VramfitError:
    """What is raised where an interrupt left nothing to report."""
    error = VramfitError(f"interrupted {when}")
    error.exit_code = INTERRUPTED
    return error


def print_bug() -> None:
    """Print the exception in flight and how to report it."""
    traceback.print_exc()
    python = ".".join(str(part) for part in sys.version_info[:3])
    print(
        f"\nThis is a bug in vramfit {__version__} (Python {python}, {sys.platform}), not in your program. "
        "Please report it with the lines above and the command you ran.",
        file=sys.stderr,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
    """Guard standard output, which is yielded, and standard error; streams that the shell closed lead nowhere."""
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
