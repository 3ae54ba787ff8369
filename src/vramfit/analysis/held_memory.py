"""Memory held beyond its use: how much of it each name of the program had at the peak, and what would free it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes, Measure, running
from vramfit.analysis.breakdown import last_oom_row
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import Grouping
from vramfit.analysis.held_remedies import remedy
from vramfit.trace import Frame, MemoryTrace, Source
from vramfit.trace.holder_notes import Beyond, HolderNote, holder_notes, least_bytes

_AT_THE_PEAK = 0.98
"""Share of the peak from which a moment counts as one at the peak: steps are alike, and are not all looked at."""


class HeldAt(Enum):
    """The moment at which something was held."""

    RAN_OUT = "ran_out"
    """When the request that ended the program failed."""
    PEAK = "peak"
    """When the device held most."""
    END = "end"
    """When the program ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory:
    """What one name of the program held beyond its use. Bytes are those of blocks, as torch counts them.

    Attributes:
        name: what the program calls it: ``checkpoint``, ``schedule.optimizer``, ``M.outputs``; the types in the circle
            where only a circle of references holds it.
        where: function and line of a local variable, or the module of a global one; empty for others.
        root: where the chain of owners begins, a value of `vramfit.holders.chains.Root`.
        through: what the chain passes through, values of `vramfit.holders.chains.Through`.
        chain: the whole chain, for people.
        reason: why it counts as beyond its use.
        moment: when so much was held.
        bytes, count: what was held then, and in how many blocks.
        end_bytes: what of it was left when the trace ended.
        line: the user's line that allocated most of it.
        op: the operator that did.
        remedy: what would free it, as a sentence.
    """

    name: str
    where: str
    root: str
    through: tuple[str, ...]
    chain: str
    reason: Beyond
    moment: HeldAt
    bytes: int
    count: int
    end_bytes: int
    line: Frame | None
    op: str
    remedy: str


def held(trace: MemoryTrace, device: int = 0) -> tuple[HeldMemory, ...]:
    """What names of the program held beyond its use, the most bytes first.

    A name counts from `vramfit.trace.holder_notes.least_bytes` on: when the device ran out, where that ended the
    program; else at the peak or, if not then, at the end.
    """
    notes = [note for note in holder_notes(trace.meta) if note.device == device]
    if not notes:
        return ()
    timeline = DeviceTimeline.of(trace, device)
    least = least_bytes(timeline.curves.peak(Measure.ALLOCATED))
    reports = (_report(trace, timeline, note, least) for note in notes)
    return tuple(sorted((one for one in reports if one is not None), key=lambda one: (-one.bytes, one.name)))


def _report(trace: MemoryTrace, timeline: DeviceTimeline, note: HolderNote, least: int) -> HeldMemory | None:
    """What is to be said of a note; None where it was too little, or used after all."""
    lives = timeline.lives
    chosen, since = _blocks(lives, note)
    if note.reason is Beyond.GRAPH:
        unused = ~_used_by_backward(trace, lives, chosen)
        chosen, since = chosen[unused], since[unused]
    moment, row = _moment(trace, timeline, chosen, since)
    end = int(lives.block[chosen[lives.freed[chosen] == lives.rows]].sum())
    alive = chosen[(since <= row) & (row < lives.freed[chosen])]
    if lives.block[alive].sum() < least:
        moment, alive = HeldAt.END, chosen[lives.freed[chosen] == lives.rows]
        if lives.block[alive].sum() < least or last_oom_row(trace, lives.device) is not None:
            return None
    largest = Grouping.of(trace, lives, alive).groups()[0]
    return HeldMemory(
        name=note.name,
        where=note.where,
        root=note.root,
        through=note.through,
        chain=note.chain,
        reason=note.reason,
        moment=moment,
        bytes=int(lives.block[alive].sum()),
        count=len(alive),
        end_bytes=end,
        line=largest.line,
        op=largest.op,
        remedy=remedy(
            note,
            loaded=_is_loaded(trace, lives, alive),
            on_card=trace.meta.get("source") != Source.CPU.value,
        ),
    )


def _blocks(lives: Lifetimes, note: HolderNote) -> tuple[Ints, Ints]:
    """Indices of the blocks of a note, and the row from which on each counts."""
    since = np.full(lives.rows + 1, -1, dtype=np.int64)
    for first, last, counts in note.rows:
        since[max(0, first) : last + 1] = counts
    # The last element stands for what was there before the trace began, which has row -1.
    since[-1] = -1
    chosen = np.flatnonzero(since[lives.born] >= 0)
    return chosen, np.maximum(since[lives.born[chosen]], lives.born[chosen])


def _used_by_backward(trace: MemoryTrace, lives: Lifetimes, blocks: Ints) -> Flags:
    """Which blocks were alive when a backward pass began after them: what a graph holds, it may have used."""
    backward = np.array([name.endswith("/backward") for name in trace.phases] + [False])
    rows = np.append(np.flatnonzero(backward[trace.phase]), lives.rows)
    following = rows[np.searchsorted(rows[:-1], lives.born[blocks], side="right")]
    used: Flags = following < lives.freed[blocks]
    return used


def _moment(trace: MemoryTrace, timeline: DeviceTimeline, chosen: Ints, since: Ints) -> tuple[HeldAt, int]:
    """The moment to report: where it ran out, else the one at the peak at which most of these blocks were held."""
    lives, allocated = timeline.lives, timeline.curves.allocated
    if (row := last_oom_row(trace, lives.device)) is not None:
        return HeldAt.RAN_OUT, row
    counts = since < lives.freed[chosen]
    chosen, since = chosen[counts], np.minimum(since[counts], lives.rows)
    curve, _ = running(since, lives.freed[chosen], lives.block[chosen], lives.rows)
    at_peak = allocated >= _AT_THE_PEAK * timeline.curves.peak(Measure.ALLOCATED)
    return HeldAt.PEAK, int(np.argmax(np.where(at_peak, curve, -1))) if len(curve) else -1


def _is_loaded(trace: MemoryTrace, lives: Lifetimes, blocks: Ints) -> bool:
    """Whether ``torch.load`` made most of the blocks' bytes."""
    stacks = trace.stack[lives.born[blocks]]
    loads = {
        int(stack): stack >= 0
        and any(
            trace.frames[frame].filename.endswith("torch/serialization.py") for frame in trace.stacks[stack]
        )
        for stack in np.unique(stacks)
    }
    loaded = np.array([loads[int(stack)] for stack in stacks], dtype=bool)
    return bool(2 * lives.block[blocks[loaded]].sum() > lives.block[blocks].sum())
