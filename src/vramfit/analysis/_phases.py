"""Memory phase by phase (forward, backward, step of each iteration), and its growth over the iterations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._curves import Measure
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.trend import theil_sen
from vramfit.trace import MemoryTrace
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
        first: the first of them.
        worst: the one with the highest peak, the last of equals.
        last: the last of them.
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
        trace: what happened.
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
