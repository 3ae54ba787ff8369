"""What the command line prints: results on wide lines, JSON documents where ``--json`` names, and errors."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vramfit import __version__
from vramfit.errors import VramfitError

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
