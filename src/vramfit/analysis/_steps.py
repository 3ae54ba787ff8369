"""Where the steps of a program begin in its trace: by phases, passes, marks, what repeats, or equal parts."""

from __future__ import annotations

import re
from collections.abc import Sized
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.analysis._lifetimes import Ints
from vramfit.analysis._passes import pass_streaks
from vramfit.analysis._phases import SETUP, split_name
from vramfit.trace import TEARDOWN, EventKind, MemoryTrace
from vramfit.trace.frames import short_location, user_frame

LEAST_STEPS = 8
"""Fewest steps that distinguish growth from chance; see `vramfit.analysis.leaks`."""

_PARTS = 24  # equal parts of a trace in which nothing else tells the steps
_MOST = 120  # boundaries beyond this are thinned out evenly: tests of more points decide no better


class StepSource(Enum):
    """How the steps of a trace are distinguished."""

    PHASES = "phases"
    """Phases named ``step N/...``, from the optimizer's steps."""
    MARKS = "marks"
    """Marks that the program set."""
    PASSES = "passes"
    """Forward passes of a program without steps: a batch of inference, a token of generation."""
    REPEATS = "repeats"
    """A line that allocates again and again, evenly over the trace."""
    QUANTILES = "quantiles"
    """Equal parts of the time: nothing repeats."""
    GIVEN = "given"
    """The caller said where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The boundaries between the steps of a trace.

    Attributes:
        source: how the steps were found.
        rows: boundaries, ascending: each is the last event before a step begins, -1 for the state before the trace.
        numbers: the number of the step that begins at each boundary: that of its phases; else they count from 1.
        unit: what a step is: ``"step"``, or a phrase like ``"repeat of train.py:12"``.
    """

    source: StepSource
    rows: Ints
    numbers: Ints
    unit: str

    def __len__(self) -> int:
        """How many steps begin."""
        return len(self.rows)


def steps(trace: MemoryTrace, device: int = 0, *, by: StepSource | None = None) -> Steps:
    """Find where the steps begin: two phases or three marks decide; else passes, what repeats, and equal parts last.

    Args:
        device: index of the device whose events are meant.
        by: take this source, whatever it tells.
    """
    if by is not None:
        return _thinned(_FINDERS[by](trace, device))
    for find, least in (
        (_by_phases, 2),
        (_by_marks, 3),
        (_by_passes, LEAST_STEPS),
        (_by_repeats, LEAST_STEPS),
    ):
        found = find(trace, device)
        if len(found) >= least:
            return _thinned(found)
    return _by_quantiles(trace, device)


def given(rows: Ints) -> Steps:
    """Steps that begin after the given events."""
    return Steps(source=StepSource.GIVEN, rows=rows, numbers=_counted(rows), unit="round")


def _counted(boundaries: Sized) -> Ints:
    """Numbers from 1."""
    return np.arange(1, len(boundaries) + 1)


def _thinned(found: Steps) -> Steps:
    if len(found) <= _MOST:
        return found
    keep = np.unique(np.linspace(0, len(found) - 1, _MOST).round().astype(np.int64))
    return replace(found, rows=found.rows[keep], numbers=found.numbers[keep])


def _by_phases(trace: MemoryTrace, device: int) -> Steps:
    """The first event of every numbered iteration, and the teardown, where the trace shows it: the last one's end."""
    number_of = np.array(
        [-1 if (n := split_name(name)[0]) is None else n for name in trace.phases], dtype=np.int64
    )
    rows = np.flatnonzero(trace.device == device)
    phase = trace.phase[rows]
    number = np.where(phase >= 0, number_of[phase], -1) if len(number_of) else np.full(len(rows), -1)
    told, first = np.unique(number, return_index=True)
    keep = told >= 0
    starts, numbers = rows[first[keep]] - 1, told[keep]
    order = np.argsort(starts, kind="stable")
    starts, numbers = starts[order], numbers[order]
    if len(starts) and TEARDOWN in trace.phases:
        torn = rows[phase == trace.phases.index(TEARDOWN)]
        if len(torn) and torn[0] > starts[-1] + 1:
            starts, numbers = np.append(starts, torn[0] - 1), np.append(numbers, numbers[-1] + 1)
    return Steps(source=StepSource.PHASES, rows=starts, numbers=numbers, unit="step")


def _by_passes(trace: MemoryTrace, device: int) -> Steps:
    """The passes of the module that is called most often from outside every other."""
    streaks = pass_streaks(trace, device)
    calls: dict[str, list[Ints]] = {}
    for streak in streaks:
        calls.setdefault(streak.module, []).append(streak.rows)
    most = max(calls.items(), key=lambda one: sum(map(len, one[1])), default=("", []))
    rows = np.concatenate(most[1]) if most[1] else np.zeros(0, dtype=np.int64)
    return Steps(source=StepSource.PASSES, rows=rows, numbers=_counted(rows), unit=f"pass of {most[0]}")


def _by_marks(trace: MemoryTrace, device: int) -> Steps:
    """The marks of the kind that is set most often: their tags differ in numbers only."""
    rows = np.flatnonzero((trace.kind == EventKind.MARKER) & (trace.op >= 0))
    here = rows[trace.device[rows] == device]
    rows = here if len(here) else rows
    alike: dict[str, list[int]] = {}
    for row in rows.tolist():
        alike.setdefault(re.sub(r"\d+", "#", trace.ops[trace.op[row]]), []).append(row)
    most = max(alike.items(), key=lambda one: len(one[1]), default=("", []))
    return Steps(
        source=StepSource.MARKS,
        rows=np.array(most[1], dtype=np.int64),
        numbers=_counted(most[1]),
        unit=f"mark “{most[0]}”",
    )


def _by_repeats(trace: MemoryTrace, device: int) -> Steps:
    """The rarest stack that allocates at least `LEAST_STEPS` + 1 times, evenly, over most of the trace."""
    rows = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
    if (
        SETUP in trace.phases
    ):  # building and loading a model is no iteration, unless the program does nothing else
        later = rows[trace.phase[rows] != trace.phases.index(SETUP)]
        rows = later if len(later) else rows
    if len(rows) and (trace.op[rows] >= 0).any():
        rows = rows[trace.op[rows] >= 0]  # what a recorder met at its beginning was allocated by no operator
    stack = trace.stack[rows]
    order = np.argsort(stack, kind="stable")
    used, first, counts = np.unique(stack[order], return_index=True, return_counts=True)
    for candidate in np.lexsort((first, counts)).tolist():
        places = order[first[candidate] : first[candidate] + counts[candidate]]
        if used[candidate] < 0 or counts[candidate] <= LEAST_STEPS:
            continue
        gaps = np.diff(places)
        if places[-1] - places[0] < len(rows) / 2 or gaps.max() > 4 * np.median(gaps):
            continue
        frames = tuple(trace.frames[frame] for frame in trace.stacks[used[candidate]])
        where = short_location(user_frame(frames)) or "the same call"
        return Steps(
            source=StepSource.REPEATS,
            rows=rows[places] - 1,
            numbers=_counted(places),
            unit=f"repeat of {where}",
        )
    return Steps(source=StepSource.REPEATS, rows=rows[:0], numbers=rows[:0], unit="repeat")


def _by_quantiles(trace: MemoryTrace, device: int) -> Steps:
    """Equal parts of the time between the first and the last allocation, or of the events where time is unknown."""
    rows = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
    if len(rows) < 2 * _PARTS:
        return Steps(source=StepSource.QUANTILES, rows=rows[:0], numbers=rows[:0], unit="part of the trace")
    time = trace.time_us[rows]
    if time[-1] > time[0] and (np.diff(time) >= 0).all():
        wanted = np.searchsorted(time, np.linspace(time[0], time[-1], _PARTS + 1), side="left")
    else:
        wanted = np.linspace(0, len(rows) - 1, _PARTS + 1).round().astype(np.int64)
    starts = np.unique(rows[wanted])
    return Steps(
        source=StepSource.QUANTILES,
        rows=starts,
        numbers=_counted(starts),
        unit=f"1/{_PARTS} of the trace",
    )


_FINDERS = {
    StepSource.PHASES: _by_phases,
    StepSource.MARKS: _by_marks,
    StepSource.PASSES: _by_passes,
    StepSource.REPEATS: _by_repeats,
    StepSource.QUANTILES: _by_quantiles,
}
