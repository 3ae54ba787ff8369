"""The console for results that read best on wide lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 110
"""Columns where nobody says how many there are, as in a file."""


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as COLUMNS says; elsewhere 110 columns."""
    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=stderr, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return SafeConsole(stderr=stderr, highlight=False, width=_WIDTH)
