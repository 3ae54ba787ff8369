"""The largest size that fits: in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from vramfit.planner.largest_size import CardCheck, LargestSize, Try
from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import seconds
from vramfit.units import format_bytes

FIT_SCHEMA = "vramfit.fit/1"


@printed_as_lines(LargestSize)
def _lines(found: LargestSize, device: str, at_least: int | None = None, *, width: int) -> Iterator[Text]:
    """The largest size that fits, whether it is enough, and the runs that showed it."""
    limit = format_bytes(found.limit_bytes)
    if found.value:
        enough = at_least is None or found.value >= at_least
        mark, style = ("✓", "bold green") if enough else ("✗", "bold red")
        first = Text.assemble(
            (f"{mark} largest ", style),
            (f"{found.size} {found.value:,}", "bold"),
            f" on {device}: {format_bytes(found.total_bytes)} of {limit}"
            + (f", {found.failing:,} does not fit" if found.failing else "")
            + ("" if at_least is None else f"; {at_least:,} {'was' if enough else 'is'} asked for"),
        )
    elif found.predicted:
        first = Text.assemble(
            ("✗ nothing fits ", "bold red"), f"{device}: on the card {found.size} 1 takes more than {limit}"
        )
    else:
        first = Text.assemble(
            ("✗ nothing fits ", "bold red"),
            f"{device}: {found.size} 1 takes {format_bytes(found.least_bytes)} of {limit}; "
            "vramfit plan looks for changes that make it fit",
        )
    yield from broken(first, width)
    if found.failure:
        yield from broken(Text(f"  {found.failure}", style="yellow"), width)
    if found.card is not None:
        yield from broken(_card(found, found.card), width)
    yield Text()
    yield from _runs(found.size, found.tries, "step (est.)", width)
    if found.card is not None and found.card.tries:
        yield Text()
        yield Text(f"on {found.card.card}")
        yield from _runs(found.size, found.card.tries, "step", width)


def _card(found: LargestSize, card: CardCheck) -> Text:
    if card.skipped:
        return Text(f"  not confirmed on a card: {card.skipped}", style="dim")
    if card.value == found.predicted:
        told = Text(f"  confirmed on {card.card}: measured")
    else:
        told = Text.assemble(
            f"  on the virtual GPU {found.predicted:,} fits; ",
            (f"measured on {card.card}, {card.value:,} does", "bold"),
        )
    if card.left_bytes:
        told.append(
            f"; {format_bytes(card.left_bytes)} of tensors outlived their run, which the workload holds outside its "
            "model"
        )
    return told


def _runs(size: str, tries: Sequence[Try], step: str, width: int) -> Iterator[Text]:
    rows = [
        [
            Text(f"{one.value:,}"),
            Text("fits" if one.fits else "does not"),
            Text(format_bytes(one.total_bytes) if one.fits else ""),
            Text(seconds(one.step_seconds) if one.fits and one.step_seconds else ""),
            Text(f"{one.value / one.step_seconds:,.1f}" if one.fits and one.step_seconds else ""),
        ]
        for one in sorted(tries, key=lambda one: one.value)
    ]
    yield from table((size, "", "total", step, f"{size} a second"), rows, width)


@json_values.register(LargestSize)
def _json_values(found: LargestSize, device: str, at_least: int | None = None) -> dict[str, Any]:
    """What fits as plain values; docs/json.md describes them."""
    return {
        "schema": FIT_SCHEMA,
        "device": device,
        "passes": found.value >= (at_least or 1),
        "at_least": at_least,
        **asdict(found),
    }
