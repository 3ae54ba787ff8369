"""The phases of a program, and where its steps begin in its trace: by phases, marks, what repeats, or equal parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.analysis._lifetimes import Ints, Measure
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.trend import theil_sen
from vramfit.trace import EventKind, MemoryTrace
from vramfit.trace.frames import short_location, user_frame
from vramfit.units import MIB

_STEP = re.compile(r"^(?P<loop>.*?)\s*(?P<number>\d+)/(?P<part>.+)$")
_PAIRED = 200
"""Levels whose slopes are taken by pairs: their number grows with the square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A named stretch of a program. Where it was entered several times, all of them together.

    Attributes:
        name: as the trace has it, ``"step 0/forward"``.
        iteration: the number of the iteration, if the name has one.
        part: what comes after the iteration, ``"forward"``; else the whole name.
        first_row: the first event in it.
        last_row: the last event in it.
        start_allocated: bytes just before it was first entered.
        end_allocated: bytes when it was last left.
        peak_allocated: the highest while in it, counting the start of each visit.
        least_allocated: the lowest after any of its events.
        peak_reserved: the highest of the reserved bytes, counted in the same way.
        duration_us: time in it, between its first and last event of each visit.
    """

    name: str
    iteration: int | None
    part: str
    first_row: int
    last_row: int
    start_allocated: int
    end_allocated: int
    peak_allocated: int
    least_allocated: int
    peak_reserved: int
    duration_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSummary:
    """The phases of one part (all forwards, say) over the iterations.

    Attributes:
        part: ``"forward"``, ``"backward"``, ``"step"``, or the name of a phase outside any iteration.
        count: number of iterations that have it.
        worst: the one with the highest peak, the last of equals.
    """

    part: str
    count: int
    first: Phase
    worst: Phase
    last: Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the iterations leave behind.

    What is alive at the end of an iteration tells no growth: gradients that each iteration drops at its start are
    still there at the end of the last one. What counts is the low-water mark: the bytes that an iteration holds at
    every moment of it.

    Attributes:
        iterations: their numbers.
        end_allocated: bytes at the end of each.
        least_allocated: the fewest bytes during each.
        per_iteration: the change of these from one iteration to the next, as the median slope over all pairs, so that
            what is left at every second iteration counts by half; leaving out the first two
            iterations, in which optimizer state, gradients and workspaces come into being, and the last one where it
            holds less than the one before; None with fewer than four.
        lasts: every change after the first two iterations is one upwards, and there are two at least.
    """

    iterations: tuple[int, ...]
    end_allocated: tuple[int, ...]
    least_allocated: tuple[int, ...]
    per_iteration: int | None
    lasts: bool

    @property
    def is_leak(self) -> bool:
        """Whether it goes on from iteration to iteration, by a MiB at least."""
        return self.lasts and self.per_iteration is not None and self.per_iteration >= MIB

    def runs_out_at(self, headroom: int) -> int | None:
        """The iteration about which memory runs out if it goes on like this; None where nothing leaks.

        Args:
            headroom: bytes of the card that were never used up to the last iteration.
        """
        if not self.is_leak or not self.per_iteration:
            return None
        return self.iterations[-1] + max(0, headroom) // self.per_iteration + 1


def phases(trace: MemoryTrace, device: int = 0) -> tuple[Phase, ...]:
    """The phases of a trace in the order in which they were first entered; empty if it names none.

    Args:
        device: index of the device whose memory is meant.
    """
    if not len(trace) or int(trace.phase.max()) < 0:
        return ()
    bytes_over = DeviceTimeline.of(trace, device).curves
    starts = np.flatnonzero(np.concatenate([[True], trace.phase[1:] != trace.phase[:-1]]))
    ends = np.append(starts[1:], len(trace)) - 1
    allocated, reserved = bytes_over.allocated, bytes_over.reserved
    before = np.where(starts > 0, allocated[starts - 1], bytes_over.start[Measure.ALLOCATED])
    tops = np.maximum(np.maximum.reduceat(allocated, starts), before)
    lows = np.minimum.reduceat(allocated, starts)
    reserved_tops = np.maximum.reduceat(reserved, starts)
    durations = trace.time_us[ends] - trace.time_us[starts]
    visits: dict[int, list[int]] = {}
    for visit, phase in enumerate(trace.phase[starts].tolist()):
        if phase >= 0:
            visits.setdefault(phase, []).append(visit)
    found = []
    for phase, mine in visits.items():
        name = trace.phases[phase]
        iteration, part = split_name(name)
        found.append(
            Phase(
                name=name,
                iteration=iteration,
                part=part,
                first_row=int(starts[mine[0]]),
                last_row=int(ends[mine[-1]]),
                start_allocated=int(before[mine[0]]),
                end_allocated=int(allocated[ends[mine[-1]]]),
                peak_allocated=int(tops[mine].max()),
                least_allocated=int(lows[mine].min()),
                peak_reserved=int(reserved_tops[mine].max()),
                duration_us=int(durations[mine].sum()),
            )
        )
    return tuple(found)


def split_name(name: str) -> tuple[int | None, str]:
    """Iteration and part of a phase's name: ``"step 3/forward"`` gives 3 and ``"forward"``."""
    match = _STEP.match(name)
    return (int(match["number"]), match["part"]) if match else (None, name)


def summarise(all_phases: tuple[Phase, ...]) -> tuple[PhaseSummary, ...]:
    """Join the phases of the same part over the iterations, in the order of their first appearance."""
    parts: dict[str, list[Phase]] = {}
    for phase in all_phases:
        parts.setdefault(phase.part, []).append(phase)
    return tuple(
        PhaseSummary(
            part=part,
            count=len(same),
            first=same[0],
            worst=max(same, key=lambda phase: (phase.peak_allocated, phase.first_row)),
            last=same[-1],
        )
        for part, same in parts.items()
    )


def growth(all_phases: tuple[Phase, ...]) -> Growth:
    """What each iteration leaves behind. A leak shows as a steady positive change."""
    last_of: dict[int, Phase] = {}
    least: dict[int, int] = {}
    for phase in all_phases:
        if phase.iteration is not None:
            least[phase.iteration] = min(
                phase.least_allocated, least.get(phase.iteration, phase.least_allocated)
            )
            known = last_of.get(phase.iteration)
            if known is None or phase.last_row > known.last_row:
                last_of[phase.iteration] = phase
    ordered = sorted(last_of.items())
    levels = tuple(least[number] for number, _ in ordered)
    settled = levels[2:]
    if len(settled) > 1 and settled[-1] < settled[-2]:
        settled = settled[:-1]  # the end of the training lets go of much, whatever comes after it
    changes = [later - earlier for earlier, later in itertools.pairwise(settled)]
    return Growth(
        iterations=tuple(number for number, _ in ordered),
        end_allocated=tuple(phase.end_allocated for _, phase in ordered),
        least_allocated=levels,
        per_iteration=_slope(settled) if changes else None,
        lasts=len(changes) > 1 and min(changes) > 0,
    )


def _slope(levels: Sequence[int]) -> int:
    """Bytes by which levels change from one to the next; of very many some are taken, evenly spread."""
    places = np.unique(np.linspace(0, len(levels) - 1, min(len(levels), _PAIRED)).astype(np.int64))
    return round(theil_sen(np.asarray(levels)[places], places))


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
        numbers: the number of the step that begins at each boundary.
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
    """Find where the steps begin: two phases or three marks decide; else what repeats, and equal parts last.

    Args:
        device: index of the device whose events are meant.
        by: take this source, whatever it tells.
    """
    if by is not None:
        return _thinned(_FINDERS[by](trace, device))
    for find, least in ((_by_phases, 2), (_by_marks, 3), (_by_repeats, LEAST_STEPS)):
        found = find(trace, device)
        if len(found) >= least:
            return _thinned(found)
    return _by_quantiles(trace, device)


def given(rows: Ints) -> Steps:
    """Steps that begin after the given events."""
    return Steps(source=StepSource.GIVEN, rows=rows, numbers=np.arange(len(rows)), unit="round")


def _thinned(found: Steps) -> Steps:
    if len(found) <= _MOST:
        return found
    keep = np.unique(np.linspace(0, len(found) - 1, _MOST).round().astype(np.int64))
    return replace(found, rows=found.rows[keep], numbers=found.numbers[keep])


def _by_phases(trace: MemoryTrace, device: int) -> Steps:
    """The first event of every numbered iteration."""
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
    return Steps(source=StepSource.PHASES, rows=starts[order], numbers=numbers[order], unit="step")


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
        numbers=np.arange(len(most[1])),
        unit=f"mark “{most[0]}”",
    )


def _by_repeats(trace: MemoryTrace, device: int) -> Steps:
    """The rarest stack that allocates at least `LEAST_STEPS` + 1 times, evenly, over most of the trace."""
    rows = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
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
            numbers=np.arange(len(places)),
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
        numbers=np.arange(len(starts)),
        unit=f"1/{_PARTS} of the trace",
    )


_FINDERS = {
    StepSource.PHASES: _by_phases,
    StepSource.MARKS: _by_marks,
    StepSource.REPEATS: _by_repeats,
    StepSource.QUANTILES: _by_quantiles,
}
