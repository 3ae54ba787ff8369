"""Memory that names of the program hold beyond its use in the terminal: who holds it, and what frees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from vramfit.analysis import HeldAt, HeldMemory
from vramfit.holders.chains import Root
from vramfit.report.sections import SIZE, Sections
from vramfit.report.text import short_op
from vramfit.trace.holder_notes import Beyond
from vramfit.units import counted, format_bytes

TITLE = "Held beyond its use"
_SHOWN = 3
_MOMENTS = {HeldAt.PEAK: "at the peak", HeldAt.RAN_OUT: "when it ran out", HeldAt.END: "at the program's end"}
_REASONS = {
    Beyond.UNUSED: "no longer used",
    Beyond.GRAPH: "by its autograd graph, with no backward pass",
    Beyond.ERROR: "by the traceback of a caught error",
    Beyond.CYCLE: "nothing else reaches it",
    Beyond.NO_MODULE: "parameters or optimizer state of a model no longer in use",
}


def held_lines(page: Sections, found: Sequence[HeldMemory]) -> Iterator[Text]:
    """The section of a report, an empty line first; nothing where nothing is held."""
    if not found:
        return
    moments = {held.moment for held in found}
    yield Text()
    yield page.heading(TITLE, _MOMENTS[found[0].moment] if len(moments) == 1 else "")
    for held in found[:_SHOWN]:
        when = "" if len(moments) == 1 else f", {_MOMENTS[held.moment]}"
        head = Text.assemble(f"  {format_bytes(held.bytes):>{SIZE}}  ", (holder_words(held), "bold"))
        yield from page.wrapped(
            head.append(f": {made_words(held, page.location(held.line))}{when}"), indent=SIZE + 4
        )
        yield from page.wrapped(
            Text(f"{'':{SIZE + 4}}frees it: {held.remedy}", style="yellow"), indent=SIZE + 6
        )
    if rest := found[_SHOWN:]:
        left = format_bytes(sum(held.bytes for held in rest))
        yield Text(f"  {left:>{SIZE}}  by {counted(len(rest), 'other name')}", style="bright_black")


def holder_words(held: HeldMemory) -> str:
    """Who holds it: ``checkpoint, a global of train``."""
    if held.reason is Beyond.CYCLE:
        return f"a reference cycle of {held.name}"
    if held.root == Root.GLOBAL.value:
        return f"{held.name}, {'a global of' if held.name in held.chain else 'from'} {held.where}"
    if held.root == Root.LOCAL.value:
        return f"{held.name}, in {held.where}"
    return f"{held.name}, a {held.root}"


def moment_words(held: HeldMemory) -> str:
    """When so much was held: ``at the peak``."""
    return _MOMENTS[held.moment]


def made_words(held: HeldMemory, place: str) -> str:
    """What it is: number of blocks, the line that made them, and why they count."""
    parts = [counted(held.count, "block")]
    if place:
        parts.append(f"made at {place}" + (f" ({short_op(held.op)})" if held.op else ""))
    parts.append(_REASONS[held.reason])
    return ", ".join(parts)
