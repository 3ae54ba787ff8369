"""Memory held beyond its use, on a page: who holds it, since which line, and what would free it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vramfit.analysis import HeldMemory, short_location
from vramfit.report.held_words import TITLE, holder_words, made_words, moment_words
from vramfit.report.html.markup import Html, join, table, tag
from vramfit.units import format_bytes


def held_html(found: Sequence[HeldMemory], *, root: Path | None) -> Html:
    """The holders of a device as a table; empty where there are none."""
    if not found:
        return Html()
    rows = [
        (
            format_bytes(held.bytes),
            moment_words(held),
            holder_words(held),
            made_words(held, short_location(held.line, root=root)),
            held.remedy,
        )
        for held in found
    ]
    heads = ("bytes", "when", "held by", "what", "frees it")
    return join([tag("h3", TITLE), table(heads, rows)])
