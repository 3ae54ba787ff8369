"""What is alive at one moment, usually the peak: by category, module and tensor, with the user's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Curves, Ints, Lifetimes, Measure, born_column
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import (
    Grouping,
    ModuleNode,
    TensorGroup,
    entry,
    module_tree,
    stack_frames,
)
from vramfit.analysis.occupancy import Fragmentation, fragmentation
from vramfit.trace import RAN_OUT, Category, EventKind, Frame, MemoryTrace
from vramfit.trace.frames import user_frame
from vramfit.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An event of a trace and what the program was doing then.

    Attributes:
        row: the event; values hold right after it. -1 is the state before the first event.
        phase: name of the phase, empty if none.
        op: the operator, empty if unknown.
        line: the user's line.
    """

    row: int
    time_us: int
    phase: str
    op: str
    line: Frame | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """The allocated memory of one device at one moment. Bytes are those of blocks, as torch counts them.

    Attributes:
        allocated: bytes allocated; the sum of ``categories``, and the total of ``modules``.
        active: allocated, and given back but still awaited by a stream.
        categories: bytes by category; every category is present.
        requested: bytes that were asked for, by category; what a category has beyond them is slack: sizes are rounded
            up, and a block of the large pool keeps a rest of up to 1 MiB (c10/cuda/CUDACachingAllocator.cpp,
            should_split).
        modules: the tree of modules; the root's own bytes belong to no module.
        tensors: groups of like tensors, largest total first.
        tensors_omitted: groups that were left off, and their bytes: (count, bytes).
        slack: bytes of allocated blocks that nobody asked for.
    """

    device: int
    moment: Moment
    allocated: int
    active: int
    categories: Mapping[Category, int]
    requested: Mapping[Category, int]
    modules: ModuleNode
    tensors: tuple[TensorGroup, ...]
    tensors_omitted: tuple[int, int]
    fragmentation: Fragmentation
    slack: int

    def __repr__(self) -> str:
        reserved = format_bytes(self.reserved)
        return (
            f"<Breakdown of GPU {self.device}: {format_bytes(self.allocated)} allocated, {reserved} reserved>"
        )

    @property
    def reserved(self) -> int:
        """Bytes held from the driver at that moment."""
        return self.fragmentation.reserved

    def slack_of(self, category: Category) -> int:
        """Bytes of a category's blocks that nobody asked for."""
        return self.categories[category] - self.requested[category]


def peak(
    trace: MemoryTrace, device: int = 0, *, by: Measure = Measure.ALLOCATED, tensors: int = 100
) -> Breakdown:
    """The breakdown at the moment when ``by`` was highest.

    Where it was equally high several times, the moment with the most allocated bytes among them, the first
    of those.

    Args:
        by: which figure has its peak there.
        tensors: keep at most so many groups of tensors.
    """
    return at(trace, peak_row(DeviceTimeline.of(trace, device).curves, by), device, tensors=tensors)


def at(trace: MemoryTrace, row: int, device: int = 0, *, tensors: int = 100) -> Breakdown:
    """The breakdown right after event ``row``; -1 is before the first event.

    Raises:
        IndexError: the trace has no such event.
    """
    if not -1 <= row < len(trace):
        raise IndexError(f"the trace has no event {row}: it has {len(trace)}")
    timeline = DeviceTimeline.of(trace, device)
    lives = timeline.lives
    alive = lives.alive(row)
    category = timeline.categories[alive]
    by_category = np.zeros(len(Category), dtype=np.int64)
    np.add.at(by_category, category, lives.block[alive])
    requested = np.zeros_like(by_category)
    np.add.at(requested, category, lives.size[alive])
    groups = Grouping.of(trace, lives, alive).groups()
    omitted = groups[tensors:]
    return Breakdown(
        device=device,
        moment=moment(trace, row),
        allocated=int(by_category.sum()),
        active=int(lives.block[lives.active(row)].sum()),
        categories={kind: int(by_category[kind]) for kind in Category},
        requested={kind: int(requested[kind]) for kind in Category},
        modules=_modules(trace, lives, alive, category),
        tensors=tuple(groups[:tensors]),
        tensors_omitted=(len(omitted), sum(group.total_bytes for group in omitted)),
        fragmentation=fragmentation(trace, lives, row),
        slack=int((lives.block[alive] - lives.size[alive]).sum()),
    )


def peak_row(bytes_over: Curves, by: Measure) -> int:
    """The event at which ``by`` is highest (see `peak`); -1 if it was never as high as before the first."""
    curve = bytes_over.of(by)
    if not len(curve) or int(curve.max()) < bytes_over.start[by]:
        return -1
    highest = np.flatnonzero(curve == curve.max())
    return int(highest[np.argmax(bytes_over.allocated[highest])])


def oom_row(trace: MemoryTrace, device: int) -> int | None:
    """The last event at which ``device`` ran out of memory, if it did."""
    rows = np.flatnonzero((trace.device == device) & (trace.kind == EventKind.OOM))
    return int(rows[-1]) if len(rows) else None


def last_oom_row(trace: MemoryTrace, device: int) -> int | None:
    """The event at which ``device`` ran out of memory, if that ended the run.

    Where the trace does not say how the run ended, it did if nothing was allocated on the device after.
    """
    row = oom_row(trace, device)
    if row is None:
        return None
    told = trace.meta.get(RAN_OUT)
    if told is not None:
        last = int(np.flatnonzero(trace.kind == EventKind.OOM)[-1])
        return row if told and row == last else None
    after = (trace.device[row:] == device) & (trace.kind[row:] == EventKind.ALLOC)
    return None if after.any() else row


def moment(trace: MemoryTrace, row: int) -> Moment:
    """What the program was doing at event ``row``."""
    if row < 0:
        return Moment(row=-1, time_us=0, phase="", op="", line=None)
    return Moment(
        row=row,
        time_us=int(trace.time_us[row]),
        phase=entry(trace.phases, int(trace.phase[row])),
        op=entry(trace.ops, int(trace.op[row])),
        line=user_frame(stack_frames(trace, int(trace.stack[row]))),
    )


def _modules(trace: MemoryTrace, lives: Lifetimes, alive: Ints, category: Ints) -> ModuleNode:
    module = born_column(trace.module, lives.born[alive])
    sums = np.zeros((len(trace.modules) + 1, len(Category)), dtype=np.int64)
    np.add.at(sums, (module + 1, category), lives.block[alive])
    return module_tree(
        (trace.modules[owner - 1] if owner else "", Category(kind), int(sums[owner, kind]))
        for owner, kind in np.argwhere(sums).tolist()
    )
