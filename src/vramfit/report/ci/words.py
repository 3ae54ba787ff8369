"""What a gate holds a run to, in words and with a place in the source, for all reports of continuous integration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vramfit.analysis import Bound, Change, Gate, PeakState, TraceDiff
from vramfit.report.check import Check, gate_words
from vramfit.trace import Frame
from vramfit.units import format_bytes

_TITLES = {
    Bound.BUDGET: "GPU memory over its budget",
    Bound.BASELINE: "GPU memory above its baseline",
    Bound.CARD: "GPU out of memory",
    Bound.USED: "GPU not used",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationPlace:
    """A line of the program, and what it has to do with a gate."""

    frame: Frame
    reason: str


def title_of(gate: Gate) -> str:
    """A few words for a gate that failed."""
    return _TITLES[gate.bound]


def sentence_of(check: Check, gate: Gate) -> str:
    """What was measured and what it is held to, with the device where there are several."""
    several = len({one.device for one in check.gates}) > 1
    return f"{check.target}: {f'GPU {gate.device}: ' if several else ''}{gate_words(gate)}"


def place_of(check: Check, gate: Gate) -> AnnotationPlace | None:
    """Where a reader should look first; None where no line is known.

    A run that ran out asked for memory there; more than a baseline comes from the line that grew most, and more than a
    budget from the line that holds most at the peak.
    """
    if gate.bound is Bound.CARD:
        oom = check.oom
        if oom is None or oom.device != gate.device or oom.user_line is None:
            return _largest(check.states, gate.device)
        return AnnotationPlace(
            frame=oom.user_line, reason=f"{format_bytes(oom.requested_bytes)} were asked for here"
        )
    if gate.bound is Bound.BASELINE and (grown := _grown(check.diffs, gate.device)) is not None:
        return grown
    return _largest(check.states, gate.device)


def _grown(diffs: Sequence[TraceDiff], device: int) -> AnnotationPlace | None:
    sums: dict[Frame, int] = {}
    for one in diffs:
        if one.after.device != device:
            continue
        for change in one.changes:
            if change.change in (Change.NEW, Change.GREW) and change.line_after is not None:
                sums[change.line_after] = sums.get(change.line_after, 0) + change.size.difference
    if not sums:
        return None
    line = max(sums, key=lambda frame: sums[frame])
    return AnnotationPlace(
        frame=line, reason=f"what this line makes grew most, by {format_bytes(sums[line])}"
    )


def _largest(states: Sequence[PeakState], device: int) -> AnnotationPlace | None:
    sums: dict[Frame, int] = {}
    for state in states:
        if state.device == device:
            for holding in state.holdings:
                if holding.line is not None:
                    sums[holding.line] = sums.get(holding.line, 0) + holding.total_bytes
    if not sums:
        return None
    line = max(sums, key=lambda frame: sums[frame])
    return AnnotationPlace(
        frame=line, reason=f"what this line makes holds most at the peak, {format_bytes(sums[line])}"
    )
