"""The memory of each rank that ran, over one time axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Ints
from vramfit.analysis.device_timeline import DeviceTimeline, Timeline, timeline_at
from vramfit.analysis.rank_memory import AlikeRanks, WorldMemory
from vramfit.trace import MemoryTrace

POINTS = 1_000
"""Stretches of time of which each has its fullest moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """Ranks that are alike, over time.

    Attributes:
        alike: the ranks; the first is drawn.
        over: bytes on its card. The times are simulated microseconds since the rank began.
        peak_us: when most was allocated.
    """

    alike: AlikeRanks
    over: Timeline
    peak_us: int


def rank_timelines(world: WorldMemory, *, points: int = POINTS) -> tuple[RankTimeline, ...]:
    """The ranks that ran, neighbours that are alike as one, with the fullest moment of each stretch of time.

    All are cut into the same stretches, from 0 to where the last of them ended.

    Args:
        world: the ranks.
        points: how many stretches.
    """
    end = max(int(rank.run.trace.time_us.max(initial=0)) for rank in world.ranks)
    found = []
    for row in world.rows:
        trace, device = row.first.run.trace, row.first.card.index
        over = timeline_at(trace, device, _fullest(trace, device, end, points))
        peak = int(over.time_us[over.allocated.argmax()]) if len(over.rows) else 0
        found.append(RankTimeline(alike=row, over=over, peak_us=peak))
    return tuple(found)


def _fullest(trace: MemoryTrace, device: int, end: int, points: int) -> Ints:
    """Of each stretch of time the event with the most allocated bytes, and the last, from which the next goes on."""
    if not len(trace):
        return np.zeros(0, dtype=np.int64)
    time = np.maximum.accumulate(trace.time_us)
    stretch = time * points // (end + 1)
    allocated = DeviceTimeline.of(trace, device).curves.allocated
    order = np.lexsort((-allocated, stretch))
    fullest = order[np.unique(stretch[order], return_index=True)[1]]
    last = np.flatnonzero(np.append(stretch[1:] != stretch[:-1], True))
    return np.unique(np.concatenate([fullest, last])).astype(np.int64)
