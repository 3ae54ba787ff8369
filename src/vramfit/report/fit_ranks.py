"""How many cards do, or what is the largest value that they hold: in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from vramfit.analysis.rank_search import WorldSearch
from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import elide_middle
from vramfit.units import counted, format_bytes

FIT_RANKS_SCHEMA = "vramfit.fit-ranks/1"

_FAILURE = 60
"""Characters of why a try failed."""


@printed_as_lines(WorldSearch)
def _lines(found: WorldSearch, *, width: int) -> Iterator[Text]:
    """What was found, and the runs that showed it."""
    yield from broken(_verdict(found), width)
    yield Text()
    heads = ("cards" if found.is_of_cards else found.sought, "", "worst rank", "total", "reserved")
    rows = [
        [
            Text(f"{one.value:,}"),
            Text("fits" if one.fits else "failed" if one.failure else "does not"),
            Text(str(one.worst)),
            Text(format_bytes(one.total_bytes)),
            Text(format_bytes(one.reserved_bytes)),
        ]
        for one in sorted(found.tries, key=lambda one: one.value)
    ]
    notes = [
        Text(elide_middle(one.failure, _FAILURE)) for one in sorted(found.tries, key=lambda one: one.value)
    ]
    yield from table(heads, rows, width, notes=notes)


def _verdict(found: WorldSearch) -> Text:
    best, memory = found.best, format_bytes(found.card_bytes)
    if found.is_of_cards:
        if best is None:
            last = found.tries[-1]
            return Text.assemble(
                ("✗ nothing fits: ", "bold red"),
                f"on {counted(last.value, 'card')} {found.gpu} rank {last.worst} takes at least "
                f"{format_bytes(last.total_bytes)} of {memory}",
            )
        fewer = f"; {counted(found.failing, 'card')} do not" if found.failing > 1 else "; one does not"
        does = "does" if best.value == 1 else "do"
        return Text.assemble(
            (f"✓ {counted(best.value, 'card')} ", "bold green"),
            f"{found.gpu} {does}: {format_bytes(best.total_bytes)} of {memory} on the worst rank, {best.worst}"
            f"{fewer if found.failing else ''}",
        )
    where = f"on {counted(found.size, 'card')} {found.gpu}"
    if best is None:
        return Text.assemble(
            ("✗ nothing fits ", "bold red"), f"{where}: not even {found.sought} {found.failing}"
        )
    return Text.assemble(
        ("✓ largest ", "bold green"),
        (f"{found.sought} {best.value:,} ", "bold"),
        f"{where}: {format_bytes(best.total_bytes)} of {memory} on the worst rank, {best.worst}"
        + (f"; {found.failing:,} does not fit" if found.failing else ""),
    )


@json_values.register(WorldSearch)
def _json_values(found: WorldSearch) -> dict[str, Any]:
    """The same as plain values; docs/json.md describes them."""
    values = asdict(found)
    gpu = {"name": values.pop("gpu"), "total_bytes": values.pop("card_bytes")}
    return {"schema": FIT_RANKS_SCHEMA, "gpu": gpu, **values, "world_size": values.pop("size") or found.value}
