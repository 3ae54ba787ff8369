"""How small a program's share of a card can be: its requests replayed within limits, and what it holds when idle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.analysis._phases import StepSource, steps
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.occupancy import fragmentation
from vramfit.trace import MemoryTrace, Rehearsal
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.trace.replay.replaying import UNKNOWN_TOTAL
from vramfit.units import MIB

REPLAYED_EVENTS = 200_000
"""Longer traces are not replayed: each replay would take seconds, and there are about a dozen."""
_GRAIN = 2 * MIB
"""What large segments are rounded up to (c10/cuda/CUDACachingAllocator.cpp, kRoundLarge)."""
_LOOKS = 8
"""Limits that are tried: the smallest is found to 1/256 of what is between live and reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastLimit:
    """The smallest limit of reserved memory that was seen to serve all requests of a program.

    Attributes:
        bytes: for ``per_process_memory_fraction``; never below the peak of live memory.
        retries: how often the whole cache is given back on the way, each time waiting for the card.
    """

    bytes: int
    retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parked:
    """A program that waits between two steps. Bytes.

    Attributes:
        allocated: what its tensors hold then.
        reserved: what the allocator holds then.
        emptied: what it still holds after ``empty_cache``: segments with a live block in them stay whole.
    """

    allocated: int
    reserved: int
    emptied: int


def least_limit(rehearsal: Rehearsal, peak_allocated: int, peak_reserved: int) -> LeastLimit:
    """Bisect for the smallest limit at which no more requests fail than without one.

    Whether a limit serves is not monotonic to the byte, so a smaller one may serve as well; this one was seen to.

    Args:
        rehearsal: the requests of a device.
        peak_allocated, peak_reserved: of the same device.
    """
    allowed = _play(rehearsal, UNKNOWN_TOTAL).ooms
    low, high = -(-peak_allocated // _GRAIN) * _GRAIN, max(1, peak_reserved)
    best = LeastLimit(bytes=high, retries=0)
    limit = low
    for _ in range(_LOOKS):
        if not low <= limit < high:
            break
        player = _play(rehearsal, limit)
        if player.ooms <= allowed:
            best, high = LeastLimit(bytes=limit, retries=player.counts()[2]), limit
        else:
            low = limit + _GRAIN
        limit = (low + high) // 2 // _GRAIN * _GRAIN
    return best


def _play(rehearsal: Rehearsal, limit: int) -> WhatIfPlayer:
    """Serve everything on a card with so many bytes for the allocator."""
    player = WhatIfPlayer(rehearsal.plan, rehearsal.config, rehearsal.version, limit)
    rehearsal.run(player)
    return player


def expandable_peak(rehearsal: Rehearsal) -> int:
    """Peak of reserved bytes with expandable segments, else as recorded."""
    config: AllocatorConfig = replace(rehearsal.config, expandable_segments=True)
    return rehearsal.play(config).peaks.peak_reserved


def parked(trace: MemoryTrace, device: int = 0) -> Parked | None:
    """What a program holds between the last two steps at the moment with the fewest live bytes there.

    A moment counts from the last fifth of one step to the first of the next: gradients are dropped at either side.
    None where the trace shows no steps.
    """
    found = steps(trace, device)
    if found.source not in (StepSource.PHASES, StepSource.MARKS) or len(found) < 2:
        return None
    curve = DeviceTimeline.of(trace, device).curves.allocated
    row = int(found.rows[-1])
    before = row - (row - max(0, int(found.rows[-2]))) // 5
    after = row + (len(trace) - 1 - row) // 5
    row = max(0, before) + int(np.argmin(curve[max(0, before) : after + 1]))
    held = fragmentation(trace, DeviceTimeline.of(trace, device).lives, row)
    return Parked(allocated=int(curve[row]), reserved=held.reserved, emptied=held.reserved - held.releasable)
