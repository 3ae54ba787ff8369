"""What was tried on a program that does not fit, on a page: a table with how each remedy is done."""

from __future__ import annotations

from vramfit.report.html.markup import Html, join, table, tag
from vramfit.report.remedy_table import conclusion_of, how_long
from vramfit.trace.tried_remedies import TriedRemedies
from vramfit.units import format_bytes


def remedies_html(tried: TriedRemedies | None) -> Html:
    """The table; empty where nothing was tried."""
    if tried is None:
        return Html()
    if tried.why_not:
        return join([tag("p", f"No remedy was tried: {tried.why_not}.")])
    rows = [
        (
            "fits" if row.fits else "does not fit",
            format_bytes(row.total_bytes),
            "" if row.slower is None else f"{row.slower:.2f} x",
            row.name,
            row.changes,
        )
        for row in tried.rows
    ]
    heads = ("", "needs", "time" if tried.whole else "step", "remedy", "changes in the results")
    ways = [
        tag("li", f"{row.name}: ", join(tag("code", line) for line in row.how))
        for row in tried.rows
        if row.how and " + " not in row.name
    ]
    return join(
        [
            tag("h3", f"Tried on the program, each run {how_long(tried)}"),
            table(heads, rows),
            tag("p", conclusion_of(tried)),
            tag("ul", join(ways)),
        ]
    )
