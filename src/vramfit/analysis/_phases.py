"""The phases of a program: setup, and the forward, backward and optimizer phases of its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from vramfit.analysis._lifetimes import Ints, Measure
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.trace import TEARDOWN, EventKind, MemoryTrace

SETUP = "setup"
"""The phase before the first forward pass."""

_STEP = re.compile(r"^(?P<loop>.*?)\s*(?P<number>\d+)/(?P<part>.+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A named stretch of a program. Where it was entered several times, all of them together.

    Attributes:
        name: as the trace has it, ``"step 1/forward"``.
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


def phases(trace: MemoryTrace, device: int = 0) -> tuple[Phase, ...]:
    """The phases of a trace in the order in which they were first entered; empty if it names none.

    What a program lets go of when it has done its work belongs to none of them.

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
        if name == TEARDOWN:
            continue
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
    return _with_last_end(found, trace, allocated)


def _with_last_end(found: list[Phase], trace: MemoryTrace, allocated: Ints) -> tuple[Phase, ...]:
    """The phases, the last one ended where the teardown is nearest to the end of the same part in the iteration before.

    A program that ends by itself does not say where its last step ends and where it lets go of everything: gradients
    that each step drops at its end are dropped at the end of the last one, too.
    """
    if not found or TEARDOWN not in trace.phases:
        return tuple(found)
    torn = np.flatnonzero(trace.phase == trace.phases.index(TEARDOWN))
    last = max(found, key=lambda phase: phase.last_row)
    if not len(torn) or torn[0] != last.last_row + 1 or trace.kind[torn[0]] == EventKind.MARKER:
        return tuple(found)  # the program was told to end, and the mark says where
    before = [phase for phase in found if phase.part == last.part and phase is not last]
    if last.iteration is None or not before:
        return tuple(found)
    levels = np.append(last.end_allocated, allocated[torn])
    nearest = np.abs(levels - before[-1].end_allocated).argmin()
    ended = replace(last, end_allocated=int(levels[nearest]))
    return tuple(ended if phase is last else phase for phase in found)


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
