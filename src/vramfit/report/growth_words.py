"""What the report of a run says of memory that grows: what is kept each time, where, and when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vramfit.analysis import LEAST_STEPS, KeptEach, KeptMemory, Verdict
from vramfit.trace import Frame
from vramfit.trace.outcome import End, Progress
from vramfit.units import counted, format_bytes

Location = Callable[[Frame | None], str]
"""A source line as the report writes it; empty for None."""


def growth_words(verdict: Verdict, progress: Progress, location: Location) -> Iterator[str]:
    """Sentences, none where nothing grows."""
    at_end = "" if verdict.runs_out_at is None else f": memory runs out about step {verdict.runs_out_at:,}"
    for one in verdict.kept:
        if one.each is KeptEach.PASS:
            yield _by_passes(one, verdict, location)
            continue
        amount, where = format_bytes(one.bytes_each), _where(one, location)
        leaves = "Every step leaves" if one.every == 1 else f"Every {one.unit} leave"
        yield f"{leaves} {amount} more{where}, probably a leak{at_end}.{_held(one)}"
        at_end = ""
    if not any(one.every == 1 for one in verdict.kept) and verdict.growth.is_suspected:
        yield _seen(verdict, progress)


def _seen(verdict: Verdict, progress: Progress) -> str:
    """Rises that are too few."""
    rises, amount = verdict.growth.rises, format_bytes(verdict.growth.last_rise)
    if rises == 1:
        text = f"The last step holds {amount} more than the one before, which does not tell a leak"
    else:
        text = f"{counted(rises, 'step')} in a row rose, the last by {amount}: too few to tell a leak"
    if verdict.fits is False:
        return f"{text}."
    more = f"--steps {LEAST_STEPS}" if progress.end is End.STEPS else f"{LEAST_STEPS} steps"
    return f"{text}. {more} would tell."


def _by_passes(one: KeptMemory, verdict: Verdict, location: Location) -> str:
    amount, total = format_bytes(one.bytes_each), format_bytes(one.total_bytes)
    module = one.unit.partition(" of ")[2]
    where = _where(one, location)
    if one.stays and one.evaluations > 1:
        at_end = one.evaluation_at_end(verdict.device.headroom) if verdict.fits is not False else None
        ends = f": memory runs out in evaluation {at_end:,}" if at_end and verdict.device.total else ""
        text = f"Each pass of {module} outside training keeps {amount}{where} and none is freed, {total} so far{ends}."
    else:
        line = location(one.until)
        until = "to the end" if one.stays else f"until {line}" if line else "until they are freed together"
        text = f"{one.times:,} passes of {module} in a row keep {amount} each{where} {until}, {total} in all."
    if one.graph:
        text += " No backward pass follows: run them under torch.no_grad(), or keep loss.item() in place of the loss."
    return text + _held(one)


def _where(one: KeptMemory, location: Location) -> str:
    """`` (train.py:12)``, of a library where the program has no line, else the module."""
    place = one.place
    if place is None:
        return ""
    where = location(place.line) or location(place.library_line) or place.module
    return f" ({where})" if where else ""


def _held(one: KeptMemory) -> str:
    return f" It is held by {one.holder}." if one.holder else ""
