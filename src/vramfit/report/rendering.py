"""One door to every report: what is printed, rendered as text or written as JSON is found by the type of the value.

NOTE [Where reports are found]: this package holds the reports of what is measured. A package above it brings its own:
its ``__init__`` lists the modules that register them as ``REPORT_MODULES``, and the first value of that package imports
these. So nothing here names what stands above, and a package that nobody uses costs no import.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import singledispatch, wraps
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from vramfit.console import SafeConsole
from vramfit.report.text import print_lines

_REPORTED_HERE = {
    "vramfit.calibrate": ("vramfit.report.calibrate",),
    "vramfit.doctor": ("vramfit.report.doctor",),
}
"""Reports of this package whose values may need torch: imported with the first such value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a report is printed.

    Attributes:
        console: the terminal; its width, colour and encoding are respected.
        root: the user's folder; file names below it are shown relative to it.
    """

    console: Console
    root: Path | None


@singledispatch
def printer(value: object, *_beside: object, to: Destination) -> None:  # noqa: ARG001 - those registered use it
    """Print one type of value: whoever reports it registers how, see NOTE [Where reports are found]."""
    raise TypeError(f"{type(value).__name__} cannot be printed as a report")


Page = TypeVar("Page", bound=Callable[..., Any])
Lines = TypeVar("Lines", bound=Callable[..., Iterator[Text]])


def printed_as_lines(kind: type, *, widest: int = 120) -> Callable[[Lines], Lines]:
    """Print values of a type as the lines that the decorated function gives of them for a ``width``."""

    def register(lines: Lines) -> Lines:
        @printer.register(kind)
        @wraps(lines)
        def _print(value: Any, *beside: Any, to: Destination) -> None:
            width = min(to.console.width, widest)
            print_lines(to.console, lines(value, *beside, width=width), width)

        return lines

    return register


def printed_as_page(kind: type, *, widest: int = 140) -> Callable[[Page], Page]:
    """Print values of a type as the ``lines`` of the decorated class, which is made for a width and a root."""

    def register(page_of: Page) -> Page:
        @printer.register(kind)
        @wraps(page_of, updated=())
        def _print(value: Any, *beside: Any, to: Destination) -> None:
            page = page_of(min(to.console.width, widest), to.root)
            print_lines(to.console, page.lines(value, *beside), page.width)

        return page_of

    return register


@singledispatch
def json_values(value: object, *_beside: object) -> dict[str, Any]:
    """Turn one type of value into what `json` can write: whoever reports it registers how."""
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def print_report(value: object, *beside: object, console: Console, root: Path | None = None) -> None:
    """Print a report.

    Args:
        value: a run, a plan, a list of `TraceDiff`, a `LeakReport` or any other result.
        beside: what its report needs as well: the verdict on a run; the frontier of a plan; the card and the value
            asked for of a largest size.
        console: the terminal; its width, colour and encoding are respected.
        root: the user's folder; file names below it are shown relative to it.

    Raises:
        TypeError: there is no report of such values.
    """
    _of(printer, value)(value, *beside, to=Destination(console=console, root=root))


def render(value: object, *beside: object, width: int = 80, root: Path | None = None) -> str:
    """The text that `print_report` prints, in ``width`` columns and without colour."""
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=width, color_system=None, force_terminal=False)
    print_report(value, *beside, console=console, root=root)
    return stream.getvalue()


def to_json(value: object, *beside: object) -> dict[str, Any]:
    """The report as values that `json` can write; docs/json.md describes them. Sizes are bytes.

    Args:
        value: as for `print_report`.
        beside: as for `print_report`; of a run also the reconciliation with a recording, of a calibration the file of
            its profile.

    Raises:
        TypeError: there is no JSON of such values.
    """
    found: dict[str, Any] = _of(json_values, value)(value, *beside)
    return found


def json_text(value: object, *beside: object, indent: int = 2, ascii_only: bool = False) -> str:
    """What `to_json` gives as text, ending with a newline."""
    return json.dumps(to_json(value, *beside), indent=indent, ensure_ascii=ascii_only) + "\n"


def _of(registered: Any, value: object) -> Callable[..., Any]:
    """The function for a value's type, whose module is imported where that has not happened yet."""
    for module in _report_modules(type(value)):
        importlib.import_module(module)
    found: Callable[..., Any] = registered.dispatch(type(value))
    return found


def _report_modules(kind: type) -> Iterator[str]:
    """The modules that report values of a type: those that each package around it and around its bases names."""
    for base in kind.__mro__:
        parts = base.__module__.split(".")
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            yield from _REPORTED_HERE.get(package, ())
            yield from getattr(sys.modules.get(package), "REPORT_MODULES", ())
