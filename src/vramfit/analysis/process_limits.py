"""How small a program's share of a card can be: its requests replayed within limits, and what it holds when idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.analysis._lifetimes import Ints, Measure
from vramfit.analysis._steps import StepSource, steps
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.occupancy import fragmentation
from vramfit.trace import TEARDOWN, EventKind, MemoryTrace, Rehearsal
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.trace.replay.replaying import UNKNOWN_TOTAL
from vramfit.trace.replay.steps import FREE, SPECIAL, Special
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
class EmptiedBetweenSteps:
    """A program that gives its cache back between its steps. Bytes.

    Attributes:
        allocated: what its tensors hold between the last two steps.
        reserved: what the allocator holds then, if nothing is given back.
        emptied: the most that is still reserved after an ``empty_cache`` there: segments with a live block stay whole.
        peak: the most that is reserved during the run.
        replayed: whether that is so with an ``empty_cache`` between all steps; otherwise, for a long trace, ``emptied``
            is what a single one leaves, and ``peak`` that of the run as it was.
    """

    allocated: int
    reserved: int
    emptied: int
    peak: int
    replayed: bool


def least_limit(rehearsal: Rehearsal, peak_allocated: int, peak_reserved: int) -> LeastLimit:
    """Bisect for the smallest limit at which no more requests fail than without one.

    Whether a limit serves is not monotonic to the byte, so a smaller one may serve as well; this one was seen to.

    Args:
        rehearsal: the requests of a device.
        peak_allocated, peak_reserved: of the same device.
    """
    allowed = _play(rehearsal, UNKNOWN_TOTAL).ooms
    low, high = max(_GRAIN, -(-peak_allocated // _GRAIN) * _GRAIN), peak_reserved
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


def parked(
    trace: MemoryTrace, device: int = 0, rehearsal: Rehearsal | None = None
) -> EmptiedBetweenSteps | None:
    """What a program holds between its steps, each time at the moment with the fewest live bytes there.

    Such a moment is in the last fifth of a step, which reaches up to the forward pass of the next: gradients are gone,
    and the next batch is not there yet. None where the trace shows no steps.

    Args:
        rehearsal: the requests of the device, to be replayed; None for a trace that is too long.
    """
    found = steps(trace, device)
    if found.source not in (StepSource.PHASES, StepSource.MARKS) or len(found) < 2:
        return None
    timeline = DeviceTimeline.of(trace, device)
    ends = [row for row in found.rows.tolist() if not _is_followed_by_teardown(trace, row)]
    rows = [_quietest(timeline.curves.allocated, before, row) for before, row in pairwise(ends)]
    if not rows:
        return None
    held = fragmentation(trace, timeline.lives, rows[-1])
    allocated = int(timeline.curves.allocated[rows[-1]])
    if rehearsal is None:
        return EmptiedBetweenSteps(
            allocated=allocated,
            reserved=held.reserved,
            emptied=held.reserved - held.releasable,
            peak=timeline.curves.peak(Measure.RESERVED),
            replayed=False,
        )
    player = _EmptyingPlayer(rehearsal, _requests_before(trace, device, rows))
    rehearsal.run(player)
    return EmptiedBetweenSteps(
        allocated=allocated,
        reserved=held.reserved,
        emptied=max(player.left, default=held.reserved),
        peak=player.allocator.peak_reserved_bytes,
        replayed=True,
    )


def _is_followed_by_teardown(trace: MemoryTrace, row: int) -> bool:
    """Whether the program ended after the event ``row``: what it lets go of then is not what it holds between steps."""
    return row + 1 < len(trace) and trace.phases[trace.phase[row + 1]] == TEARDOWN


def _quietest(live: Ints, before: int, row: int) -> int:
    """The event with the fewest live bytes after it in the last fifth before event ``row``; the last of equals."""
    first = max(0, row - (row - before) // 5)
    return row - int(np.argmin(live[first : row + 1][::-1]))


def _requests_before(trace: MemoryTrace, device: int, rows: Sequence[int]) -> list[int]:
    """How many requests of a device there are up to each event."""
    requests = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
    return [int(count) for count in np.searchsorted(requests, rows, side="right")]


class _EmptyingPlayer(WhatIfPlayer):
    """Empties the cache before some of the requests, as a program that calls ``empty_cache`` there.

    Attributes:
        left: what is still reserved after each.
    """

    def __init__(self, rehearsal: Rehearsal, before: Sequence[int]) -> None:
        """``before`` counts requests."""
        self.left: list[int] = []
        plan, mark = rehearsal.plan, Special(EventKind.SEGMENT_FREE)
        self._mark = mark
        addresses, sizes, specials = [], [], []
        coming, wanted, number = iter(plan.specials), set(before), 0
        for address, size in zip(plan.addresses, plan.sizes, strict=True):
            special = next(coming) if size < FREE else None
            if size > FREE or (special is not None and special.kind == EventKind.ALLOC):
                if number in wanted:
                    addresses.append(0)
                    sizes.append(SPECIAL)
                    specials.append(mark)
                number += 1
            addresses.append(address)
            sizes.append(size)
            if special is not None:
                specials.append(special)
        changed = replace(plan, addresses=addresses, sizes=sizes, specials=specials)
        super().__init__(changed, rehearsal.config, rehearsal.version, UNKNOWN_TOTAL)

    def special(self, special: Special, address: int) -> None:
        """Serve a step that is more than one call, and note what an emptied cache leaves."""
        super().special(special, address)
        if special is self._mark:
            self.left.append(self.allocator.reserved_bytes)
