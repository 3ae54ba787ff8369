"""Several programs on one card: in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from vramfit.analysis import CardSharing, Moment, SharedProcess, SharingOutcome, StepMeeting, short_location
from vramfit.report.folding import broken, table
from vramfit.report.json_report import moment_to_json
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.text import seconds, short_op
from vramfit.units import counted, format_bytes

TOGETHER_SCHEMA = "vramfit.together/1"

_NONE = "–"


@printed_as_page(CardSharing)
class _Page:
    """The report for one width."""

    def __init__(self, width: int, root: Path | None) -> None:
        self.width = width
        self.root = root

    def lines(self, found: CardSharing) -> Iterator[Text]:
        """The verdict, who takes what, limits, contexts, and when peaks meet."""
        yield from broken(_verdict(found), self.width)
        yield Text()
        yield from self._processes(found)
        if found.outcome is not SharingOutcome.FITS:
            yield from self._sets(found)
        yield Text()
        yield Text("What each may have", style="bold")
        for line in _limits(found):
            yield from broken(Text(f"  {line}"), self.width, indent=2)
        yield Text()
        yield from broken(
            Text.assemble(
                ("When live memory meets  ", "bold"),
                f"{format_bytes(found.worst.bytes)} at once, {seconds(found.worst.seconds)} after all have started",
            ),
            self.width,
        )
        yield from self._worst(found)
        for line in _steps(found):
            yield from broken(Text(f"  {line}"), self.width, indent=2)
        yield Text()
        yield Text("How the card is shared", style="bold")
        for line in _modes(found):
            yield from broken(Text(f"  {line}"), self.width, indent=2)

    def _processes(self, found: CardSharing) -> Iterator[Text]:
        heads = ("process", "context", "reserved", "of it live", "least", "expandable", "emptied")
        rows = [
            [
                Text(one.name),
                Text(format_bytes(one.context)),
                Text(format_bytes(one.reserved)),
                Text(format_bytes(one.allocated)),
                Text(_NONE if one.least is None else format_bytes(one.smallest)),
                Text(_NONE if one.expandable is None else format_bytes(one.expandable)),
                Text(_NONE if one.between_steps is None else format_bytes(one.between_steps.emptied)),
            ]
            for one in found.processes
        ]
        yield from table(heads, rows, self.width)

    def _sets(self, found: CardSharing) -> Iterator[Text]:
        most = [chosen for chosen in found.fitting if len(chosen) > 1]
        if len(found.processes) > 2 and most:
            for chosen in most[:4]:
                names = " and ".join(found.processes[at].name for at in chosen)
                taken = sum(found.processes[at].total for at in chosen)
                yield from broken(Text(f"  fit as they are: {names}, {format_bytes(taken)}"), self.width)

    def _worst(self, found: CardSharing) -> Iterator[Text]:
        for one, part, moment in zip(found.processes, found.worst.parts, found.worst.moments, strict=True):
            what = "over by then" if moment is None else self._doing(moment)
            yield from broken(Text(f"  {format_bytes(part):>10}  {one.name}: {what}"), self.width, indent=14)

    def _doing(self, moment: Moment) -> str:
        parts = [moment.phase, short_op(moment.op), short_location(moment.line, root=self.root)]
        return ", ".join(part for part in parts if part) or "not known"


def _verdict(found: CardSharing) -> Text:
    programs = counted(len(found.processes), "program")
    taken, card = format_bytes(found.total), format_bytes(found.card_bytes)
    if found.outcome is SharingOutcome.FITS:
        mark, style, words = "✓", "bold green", f"fit {found.card} side by side"
        told = f": {taken} of {card}, {format_bytes(found.free)} free"
        if found.close:
            told += "; estimated sizes could turn that"
    else:
        mark, style, words = "✗", "bold red", f"do not fit {found.card} side by side as they are"
        told = f": {taken} of {card}, {format_bytes(-found.free)} too much"
        if found.free >= 0:
            told = ""
    alone = [one.name for one in found.processes if not one.fits_alone]
    if alone:
        told += f"; out of memory by itself already: {', '.join(alone)}"
    elif found.outcome is SharingOutcome.WITH_LIMITS:
        told += f"; with a limit for each they do: {format_bytes(found.with_limits)}"
    elif found.outcome is SharingOutcome.IN_TURNS and found.in_turns is not None:
        told += (
            f"; they do if one at a time runs a step while the others wait with an emptied cache: "
            f"{format_bytes(found.in_turns)}"
        )
    return Text.assemble((f"{mark} {programs} {words}", style), told)


def _limits(found: CardSharing) -> Iterator[str]:
    """Fractions, and what else makes a process give memory back."""
    if any(one.fraction is None for one in found.processes):
        yield (
            f"No limits do: with contexts the least come to {format_bytes(found.with_limits)}, "
            f"{format_bytes(found.with_limits - found.card_bytes)} too much"
            if found.with_limits > found.card_bytes
            else "No limits are told: a program runs out by itself"
        )
    for one in found.processes:
        if one.fraction is not None:
            yield _limit(one, found.card_bytes)
    if found.fits:
        return
    if found.in_turns is not None:
        yield (
            f"In turns, with torch.cuda.empty_cache() after each step and a lock around the step: "
            f"{format_bytes(found.in_turns)} in all. Only what is emptied can be used by another process"
        )
    yield (
        "garbage_collection_threshold acts only near a process's own limit, and gives nothing back while it is idle"
    )


def _limit(one: SharedProcess, card_bytes: int) -> str:
    assert one.fraction is not None
    share = int(one.fraction * card_bytes)
    told = f"{one.name}: per_process_memory_fraction:{one.fraction:.6f}, {format_bytes(share)}"
    if share >= one.reserved:
        return f"{told}, as much as it reserves or more"
    flushes = 0 if one.least is None else one.least.retries
    if one.expandable is not None and one.expandable <= share:
        return f"{told}; with expandable_segments:True its peak is {format_bytes(one.expandable)}"
    return f"{told}; the whole cache is given back {counted(flushes, 'time')} on the way, which waits for the card"


def _steps(found: CardSharing) -> Iterator[str]:
    """How peaks of repeated steps meet."""
    meeting: StepMeeting | None = found.steps
    if meeting is None:
        yield "Not every trace shows steps, so take it that the peaks meet"
        return
    lengths = ", ".join(seconds(one.step_seconds or 0.0) for one in found.processes)
    if not meeting.keeps:
        again = (
            ""
            if meeting.meet_every_seconds is None
            else f", every {seconds(meeting.meet_every_seconds)} or so"
        )
        yield (
            f"Steps of {lengths} drift against each other: their peaks meet{again}, "
            f"{format_bytes(meeting.sum_of_peaks)} at once, however they are started"
        )
    elif meeting.apart < meeting.together:
        shifts = ", ".join(f"{shift:.0%}" for shift in meeting.shifts)
        yield (
            f"Steps begun together hold {format_bytes(meeting.together)} live, shifted by {shifts} of a step "
            f"({lengths}) {format_bytes(meeting.apart)}, as long as nothing stalls one of them"
        )
    else:
        yield f"No shift of a step helps: {format_bytes(meeting.together)} live, whenever they start"
    yield f"One step at a time, the others waiting between two of theirs: {format_bytes(meeting.in_turns)} live"


def _modes(found: CardSharing) -> Iterator[str]:
    total = seconds(found.seconds_in_turns)
    longest = seconds(max(one.seconds for one in found.processes))
    yield (
        f"Time slicing (the default): a context for each process, {format_bytes(found.total)}; nothing is swapped "
        f"out; the seconds add up, {total} for these runs"
    )
    low, high = found.mps
    yield (
        f"MPS: from {format_bytes(low)} to {format_bytes(high)} with its server and what clients may take more; "
        f"kernels overlap, so between {longest} and {total}"
    )
    if found.fits and high > found.card_bytes:
        yield "At the upper end of that they do not fit under MPS"


@json_values.register(CardSharing)
def _json_values(found: CardSharing) -> dict[str, Any]:
    """The same as plain values; docs/json.md describes them."""
    return {
        "schema": TOGETHER_SCHEMA,
        "gpu": {"name": found.card, "total_bytes": found.card_bytes},
        "outcome": found.outcome.value,
        "fits": found.fits,
        "close": found.close,
        "total_bytes": found.total,
        "free_bytes": found.free,
        "with_limits_bytes": found.with_limits,
        "in_turns_bytes": found.in_turns,
        "time_slicing": {"total_bytes": found.total, "seconds": found.seconds_in_turns},
        "mps": {
            "least_bytes": found.mps[0],
            "most_bytes": found.mps[1],
            "least_seconds": max(one.seconds for one in found.processes),
            "most_seconds": found.seconds_in_turns,
        },
        "processes": [_process_values(one) for one in found.processes],
        "fitting": [list(chosen) for chosen in found.fitting],
        "worst_live": {
            "bytes": found.worst.bytes,
            "seconds": found.worst.seconds,
            "parts": [
                {"bytes": part, "moment": None if moment is None else moment_to_json(moment)}
                for part, moment in zip(found.worst.parts, found.worst.moments, strict=True)
            ],
        },
        "steps": None if found.steps is None else _step_values(found.steps),
    }


def _process_values(one: SharedProcess) -> dict[str, Any]:
    waiting = one.between_steps
    return {
        "name": one.name,
        "fits_alone": one.fits_alone,
        "context_bytes": one.context,
        "reserved_bytes": one.reserved,
        "reserved_above_bytes": one.reserved_above,
        "allocated_bytes": one.allocated,
        "least_bytes": None if one.least is None else one.smallest,
        "least_retries": None if one.least is None else one.least.retries,
        "expandable_bytes": one.expandable,
        "between_steps": None
        if waiting is None
        else {
            "allocated_bytes": waiting.allocated,
            "reserved_bytes": waiting.reserved,
            "emptied_bytes": waiting.emptied,
            "peak_bytes": waiting.peak,
            "replayed": waiting.replayed,
        },
        "fraction": one.fraction,
        "seconds": one.seconds,
        "step_seconds": one.step_seconds,
    }


def _step_values(meeting: StepMeeting) -> dict[str, Any]:
    values = asdict(meeting)
    named = ("together", "apart", "sum_of_peaks", "in_turns")
    return {f"{key}_bytes" if key in named else key: value for key, value in values.items()}
