"""Errors at the command line: one line with the reason and one with the next step, on stderr."""

from __future__ import annotations

import sys
import traceback

from vramfit import __version__
from vramfit.errors import VramfitError

INTERNAL_ERROR = 70
"""Exit code of a bug in vramfit (EX_SOFTWARE of sysexits.h), told apart from the program's own failure."""


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
