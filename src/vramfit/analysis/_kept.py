"""What a program keeps each time: of each step, of each epoch, or of each pass of an evaluation, and from which line.

NOTE [Where growth is looked for]
From step to step by `leaks`, which also knows what is left at even distances of steps, as once an epoch. Within an
evaluation, the passes of its module are the steps: passes that no backward pass follows (`_passes`). Over all
evaluations of the run first, since what a list gathers may stay for good; then within the one that grows most, whose
outputs or graphs are let go of at its end. Memory counts as kept by passes where blocks of most of them are there at
the last one (of nearly all, over several evaluations): a cache of keys and values that is made anew with each token
grows as well, and has a single block. What a backward pass frees was needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.analysis._growth import ALPHA, Growth
from vramfit.analysis._leaks import GrowingStack, LeakPlace, LeakReport, leaks
from vramfit.analysis._lifetimes import Ints
from vramfit.analysis._passes import PassStreak, pass_streaks
from vramfit.analysis._phases import split_name
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.held_memory import HeldMemory
from vramfit.trace import TEARDOWN, Category, EventKind, Frame, MemoryTrace
from vramfit.trace.frames import user_frame
from vramfit.units import MIB

_LEAST_PASSES = 8
"""Fewest passes in a row whose growth is looked at: warm-up and six levels."""
_LEAST_IN_EACH = 4
"""Fewest passes of an evaluation that counts among several."""
_SHARE = 20
"""What is let go of again counts from this part of the peak on, a twentieth."""
_MOST, _NEARLY_ALL = 0.5, 0.9
"""Parts of the passes whose blocks must be there at the last one: of one evaluation, and of several, where those of the
first must be among them."""
_BACK = 64
"""Allocations before a free that are looked through for a line of the program."""


class KeptEach(Enum):
    """When a program keeps something."""

    STEP = "step"
    EPOCH = "epoch"
    """At even distances of steps."""
    PASS = "pass"
    """With each forward pass outside training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptMemory:
    """Memory that a program keeps time after time.

    Attributes:
        each: when.
        unit: what a time is, in words: ``step``, ``4 steps``, ``pass of Net``.
        every: steps from one time to the next; 1 for steps, 0 for passes.
        times: how often it was seen.
        bytes_each: bytes that each time adds.
        stays: it was not let go of before the program did so with everything.
        until: the program's line after which it was let go of; None where it stays, or no line is known.
        graph: it was computed with gradients on and let go of without a backward pass.
        place: what allocates most of it.
        places: how many stacks take part.
        evaluations: how many evaluations the passes make up; 0 for steps.
        holder: the name by which the program holds it; None where that is not known.
    """

    each: KeptEach
    unit: str
    every: int
    times: int
    bytes_each: int
    place: LeakPlace | None
    places: int = 1
    stays: bool = True
    until: Frame | None = None
    graph: bool = False
    evaluations: int = 0
    holder: str | None = None

    @property
    def total_bytes(self) -> int:
        """What all those times add up to."""
        return self.bytes_each * self.times

    def evaluation_at_end(self, headroom: int) -> int | None:
        """The evaluation in which memory runs out if it goes on like this; None where it does not stay.

        Args:
            headroom: bytes of the card that were never used.
        """
        if not self.stays or self.evaluations < 2 or self.bytes_each <= 0:
            return None
        each = self.bytes_each * max(1, self.times // self.evaluations)
        return self.evaluations + max(0, headroom) // each + 1


def kept(trace: MemoryTrace, device: int, grown: Growth, report: LeakReport | None) -> tuple[KeptMemory, ...]:
    """What a program keeps each time, in steps first.

    Args:
        grown: what the levels of its steps show.
        report: what `leaks` says of its steps; None where they are too few.
    """
    found = [*_by_steps(grown, report), *_by_epochs(report)]
    by_passes = _by_passes(trace, device)
    return tuple(found if by_passes is None else [*found, by_passes])


def with_holders(each: Sequence[KeptMemory], holders: Sequence[HeldMemory]) -> tuple[KeptMemory, ...]:
    """The same with the names that hold what the same line allocated, where one was found."""
    return tuple(replace(one, holder=_holder(one, holders)) for one in each)


def _holder(one: KeptMemory, holders: Sequence[HeldMemory]) -> str | None:
    """The name that holds most of what a line allocated; None where no name or no line is known."""
    line = one.place.line if one.place is not None else None
    names = [holder for holder in holders if line is not None and holder.line == line]
    if not names:
        return one.holder
    most = max(names, key=lambda holder: holder.bytes)
    return f"{most.name} in {most.where}" if most.where else most.name


def _by_steps(grown: Growth, report: LeakReport | None) -> list[KeptMemory]:
    stacks = [] if report is None else [stack for stack in report.growing if stack.every == 1]
    proven = report is not None and report.leaks and bool(stacks)
    if not grown.is_leak and not proven:
        return []
    together = round(sum(stack.bytes_per_step for stack in stacks))
    each = (grown.per_iteration or 0) if grown.is_leak else together
    if each < MIB:
        return []
    return [
        KeptMemory(
            each=KeptEach.STEP,
            unit="step",
            every=1,
            times=max(grown.rises, 1),
            bytes_each=each,
            place=stacks[0].place if stacks else None,
            places=len(stacks),
        )
    ]


def _by_epochs(report: LeakReport | None) -> list[KeptMemory]:
    found = []
    rare = [] if report is None or not report.leaks else [one for one in report.growing if one.every > 1]
    for every in sorted({stack.every for stack in rare}):
        stacks = [stack for stack in rare if stack.every == every]
        each = round(sum(stack.bytes_per_step * every for stack in stacks))
        if each >= MIB:
            found.append(
                KeptMemory(
                    each=KeptEach.EPOCH,
                    unit=f"{every} steps",
                    every=every,
                    times=int((np.diff(stacks[0].levels[1:]) > 0).sum()),
                    bytes_each=each,
                    place=stacks[0].place,
                    places=len(stacks),
                )
            )
    return found


# -- Passes ----------------------------------------------------------------------------------------------------


def _by_passes(trace: MemoryTrace, device: int) -> KeptMemory | None:
    streaks = [one for one in pass_streaks(trace, device) if len(one.outside_training) >= _LEAST_IN_EACH]
    if not streaks:
        return None
    timeline = DeviceTimeline.of(trace, device)
    allocated = timeline.curves.allocated
    rises = [int(allocated[one.outside_training[-1]] - allocated[one.rows[0]]) for one in streaks]
    if max(rises) < MIB:
        return None
    if len(streaks) > 1:
        alike = [one for one in streaks if one.module == streaks[int(np.argmax(rises))].module]
        over_all = _Passes(trace, device, alike).kept()
        if over_all is not None and over_all.stays:
            return over_all
    most = streaks[int(np.argmax(rises))]
    found = _Passes(trace, device, [most]).kept()
    if found is None or (not found.stays and found.total_bytes * _SHARE < int(allocated.max())):
        return None
    return found


class _Passes:
    """What some evaluations keep of each pass."""

    def __init__(self, trace: MemoryTrace, device: int, streaks: Sequence[PassStreak]) -> None:
        self.trace, self.device, self.streaks = trace, device, streaks
        self.rows = np.concatenate([streak.outside_training for streak in streaks])

    def kept(self) -> KeptMemory | None:
        """None where that is nothing, or a backward pass frees it."""
        if len(self.rows) < _LEAST_PASSES:
            return None
        report = leaks(self.trace, self.device, boundaries=self.rows, alpha=ALPHA)
        most = _NEARLY_ALL if len(self.streaks) > 1 else _MOST
        stacks = [stack for stack in report.growing if self._share(stack, report.warmup) >= most]
        each = round(sum(stack.bytes_per_step for stack in stacks))
        if not report.leaks or not stacks or each * len(self.rows) < MIB:
            return None
        born = np.concatenate([np.asarray(stack.rows, dtype=np.int64) for stack in stacks])
        freed = self._freed(born)
        if self._part_of(freed) == "backward":
            return None
        stays = freed >= len(self.trace) or self._part_of(freed) == TEARDOWN
        return KeptMemory(
            each=KeptEach.PASS,
            unit=f"pass of {self.streaks[0].module}",
            every=0,
            times=len(self.rows),
            bytes_each=each,
            place=stacks[0].place,
            places=len(stacks),
            stays=stays,
            until=None if stays else self._line_before(freed),
            graph=bool(np.median(self.trace.category[born]) == Category.TEMPORARIES),
            evaluations=len(self.streaks),
        )

    def _share(self, stack: GrowingStack, warmup: int) -> float:
        """The part of the passes after the warm-up whose blocks are there at the last one."""
        born = np.asarray(stack.rows, dtype=np.int64)
        inside = np.zeros(len(born), dtype=bool)
        for streak in self.streaks:
            end = int(streak.rows[-1]) if streak.trains else streak.last_row
            inside |= (born > streak.rows[0]) & (born <= end)
        passes = np.unique(np.searchsorted(self.rows, born[inside]))
        return len(passes) / max(1, len(self.rows) - 1 - warmup)

    def _freed(self, born: Ints) -> int:
        """The event at which half of some blocks are gone; the number of events where they stay."""
        lives = DeviceTimeline.of(self.trace, self.device).lives
        return int(np.median(lives.freed[np.isin(lives.born, born)]))

    def _part_of(self, row: int) -> str:
        if row >= len(self.trace) or self.trace.phase[row] < 0:
            return ""
        return split_name(self.trace.phases[self.trace.phase[row]])[1]

    def _line_before(self, row: int) -> Frame | None:
        """The program's line that allocated last before an event: frees have none of their own."""
        trace = self.trace
        before = np.flatnonzero((trace.kind[:row] == EventKind.ALLOC) & (trace.stack[:row] >= 0))
        for at in before[: -_BACK - 1 : -1].tolist():
            frame = user_frame(tuple(trace.frames[index] for index in trace.stacks[trace.stack[at]]))
            if frame is not None:
                return frame
        return None
