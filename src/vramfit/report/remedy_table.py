"""What was tried on a program that does not fit: a table in the terminal, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from vramfit.plain import to_plain
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.sections import Sections
from vramfit.report.text import seconds as seconds_text
from vramfit.trace.tried_remedies import TriedRemedies, TriedRemedy
from vramfit.units import format_bytes

_INDENT = 25


@json_values.register(TriedRemedies)
def _json_values(tried: TriedRemedies) -> dict[str, Any]:
    """All rows, each with how much slower its step is."""
    found: dict[str, Any] = to_plain(tried)
    found["rows"] = [{**to_plain(row), "slower": row.slower} for row in tried.rows]
    return found


@printed_as_page(TriedRemedies)
class _RemediesReport(Sections):
    """The table of what was tried."""

    def lines(self, tried: TriedRemedies) -> Iterator[Text]:
        """The rows, the cheapest of those that fit, and how to do each."""
        if tried.why_not:
            yield from self.wrapped(Text(f"  No remedy was tried: {tried.why_not}.", style="yellow"))
            return
        yield Text(f"Tried on the program, each run {how_long(tried)}", style="bold")
        yield Text(
            f"  {'':2}{'needs':>10}  {'time' if tried.whole else 'step':>7}  remedy", style="bright_black"
        )
        for number, row in enumerate(tried.rows):
            yield from self.row(row, best=number == tried.cheapest)
        yield from self.conclusion(tried)
        yield from self.ways(tried)

    def row(self, row: TriedRemedy, *, best: bool) -> Iterator[Text]:
        """A remedy, what the card has to have with it, and its step's time."""
        sign, style = ("✓", "bold green") if row.fits else ("✗", "red")
        slower = f"{row.slower:.2f} x" if row.slower is not None else ""
        name = Text(row.name, style="bold" if best else "")
        figures = f"{format_bytes(row.total_bytes):>10}  {slower:>7}  "
        yield from self.wrapped(Text.assemble("  ", (sign, style), " ", figures, name), indent=_INDENT)

    def ways(self, tried: TriedRemedies) -> Iterator[Text]:
        """How each remedy is done, and what it changes; those of several parts are done by their parts."""
        alone = [
            row
            for row in tried.rows
            if row.how and " + " not in row.name and (row.fits or not row.name.startswith("batch"))
        ]
        if not alone:
            return
        yield Text()
        yield Text("How", style="bold")
        for row in alone:
            changes = f" ({row.changes})" if row.changes else ""
            yield from self.wrapped(Text.assemble("  ", row.name, (changes, "bright_black")), indent=4)
            for line in row.how:
                yield from self.wrapped(Text(f"    {line}", style="cyan"), indent=6)

    def conclusion(self, tried: TriedRemedies) -> Iterator[Text]:
        """Which row costs least, and whether there was time for all."""
        style = "bold" if any(row.fits for row in tried.rows) else "yellow"
        yield from self.wrapped(Text(f"  {conclusion_of(tried)}", style=style))
        if tried.cut:
            when = seconds_text(tried.seconds)
            text = f"  There was no time for more after {when}: --remedies SECONDS gives it."
            yield from self.wrapped(Text(text))


def how_long(tried: TriedRemedies) -> str:
    """How far the program ran each time."""
    return "to its end" if tried.whole else "for two steps"


def conclusion_of(tried: TriedRemedies) -> str:
    """What the rows come to, in a sentence."""
    if not tried.rows:
        return "There was no time for any."
    if tried.rows[0].fits:
        least = min(tried.rows, key=lambda row: row.total_bytes)
        return f"It fits as it is; what makes most room: {least.name}."
    if tried.cheapest is None:
        return f"None of these makes it fit{' so far' if tried.cut else ''}."
    best = tried.rows[tried.cheapest]
    what = "it" if tried.whole else "its step"
    cost = "" if best.slower is None else f", {what} takes {best.slower:.2f} times as long (simulated)"
    return f"Cheapest that fits: {best.name}{cost}."
