"""What the command line prints and writes: results, JSON documents, a line of progress, and errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vramfit import __version__
from vramfit.errors import UsageError, VramfitError

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
    """Show a result, and write it as JSON where that was asked for; on standard output it is shown as JSON alone.

    Args:
        path: what ``--json`` names; None without it.
        render: makes the JSON.
        show: prints the result.

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
