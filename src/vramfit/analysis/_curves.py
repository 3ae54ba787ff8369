"""Bytes over events: allocated, active and reserved memory of one device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from vramfit.analysis._lifetimes import Ints, Lifetimes, trace_device
from vramfit.trace import Category, EventKind, MemoryTrace


class Measure(Enum):
    """Which of the allocator's figures; the names are those of ``torch.cuda.memory_stats``."""

    ALLOCATED = "allocated"
    """Blocks handed out and not yet given back."""
    ACTIVE = "active"
    """Allocated, or given back but still awaited by a stream."""
    RESERVED = "reserved"
    """Segments held from the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """One value per event of the trace, in bytes, each as it is right after the event.

    Attributes:
        device: index of the device; events of other devices leave its values as they were.
        start: the value of each measure before the first event.
    """

    device: int
    allocated: Ints
    active: Ints
    reserved: Ints
    start: dict[Measure, int]

    def of(self, measure: Measure) -> Ints:
        """The curve of one measure."""
        return {
            Measure.ALLOCATED: self.allocated,
            Measure.ACTIVE: self.active,
            Measure.RESERVED: self.reserved,
        }[measure]

    def peak(self, measure: Measure) -> int:
        """The highest value, counting the one before the first event."""
        curve = self.of(measure)
        return max(self.start[measure], int(curve.max()) if len(curve) else 0)


def curves(trace: MemoryTrace, lives: Lifetimes) -> Curves:
    """Allocated, active and reserved bytes of ``lives.device`` after each event of the trace."""
    allocated, allocated_start = running(lives.born, lives.freed, lives.block, lives.rows)
    active, active_start = running(lives.born, lives.completed, lives.block, lives.rows)
    here = trace.device == lives.device
    grows = here & ((trace.kind == EventKind.SEGMENT_ALLOC) | (trace.kind == EventKind.SEGMENT_MAP))
    shrinks = here & ((trace.kind == EventKind.SEGMENT_FREE) | (trace.kind == EventKind.SEGMENT_UNMAP))
    delta = np.where(grows, trace.size, 0) - np.where(shrinks, trace.size, 0)
    described = trace_device(trace, lives.device)
    final = sum(int(segment["total_size"]) for segment in described.segments) if described else 0
    # A recording that began late holds frees of segments that it did not see; its end is known.
    reserved_start = max(0, final - int(delta.sum()))
    return Curves(
        device=lives.device,
        allocated=allocated,
        active=active,
        reserved=reserved_start + np.cumsum(delta),
        start={
            Measure.ALLOCATED: allocated_start,
            Measure.ACTIVE: active_start,
            Measure.RESERVED: reserved_start,
        },
    )


def block_categories(trace: MemoryTrace, lives: Lifetimes) -> Ints:
    """The category of each block; OTHER for those from before the trace."""
    if not len(trace):
        return np.zeros(len(lives.born), dtype=np.int64)
    return np.where(lives.born >= 0, trace.category[lives.born], int(Category.OTHER)).astype(np.int64)


def running(born: Ints, gone: Ints, block: Ints, rows: int) -> tuple[Ints, int]:
    """Sum of the blocks alive after each row, and before the first."""
    delta = np.zeros(rows + 1, dtype=np.int64)
    inside = born >= 0
    np.add.at(delta, born[inside], block[inside])
    ended = gone >= 0
    np.subtract.at(delta, gone[ended], block[ended])
    start = int(block[~inside & ended].sum())
    return start + np.cumsum(delta[:rows]), start
