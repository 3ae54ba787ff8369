"""How far peaks may be off because the driver's addresses are unknown: the same requests with segments elsewhere.

NOTE [Bars of addresses]
Of equal free blocks the caching allocator takes the lowest. The driver's addresses therefore decide which block is
cut, what is left of it, and whether a later request finds room. That moves the peak of reserved bytes, and the peak
of allocated bytes, which include what a block has beyond its request. In recordings of an H100 and an H200 the first
segments come from two or three regions of addresses, in an order that differs from process to process; addresses fall
within each region, and later segments come from one. Requests are replayed with segments drawn from several regions:
the first ones or all of them, falling mostly, rising in some replays. To either side the bar reaches _SPANS times as
far as the farthest of these peaks: a bar of what was tried, not a bound. With the addresses of a recording, replays
of the virtual GPU's requests have the recorded peaks (benchmarks/comparing/addresses.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from vramfit.allocator.driver import REGIONS, ScatteredDriver
from vramfit.trace.model import MemoryTrace
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.trace.replay.replaying import UNKNOWN_TOTAL, Rehearsal

_REPLAYS = 10
"""Replays at most."""

_EVENTS = 250_000
"""Events that they serve in all, about a second's worth. Longer runs are replayed _LEAST times ..."""

_LEAST = 2

_LONGEST = 1_000_000
"""... and runs of more events not at all: a report is to take seconds."""

_SPANS = 2
"""How many times as far as the farthest peak of a replay a bar reaches. Recordings lie up to about twice as far."""

_FIRST = 32
"""Segments with a drawn region in every second replay; the others draw one for every segment."""

_RISING = 5
"""One replay in this many has rising addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddressBar:
    """Bytes by which peaks may be lower and higher at other addresses of the driver."""

    allocated_below: int = 0
    allocated_above: int = 0
    reserved_below: int = 0
    reserved_above: int = 0

    @property
    def below(self) -> int:
        """The larger of both below."""
        return max(self.allocated_below, self.reserved_below)

    @property
    def above(self) -> int:
        """The larger of both above."""
        return max(self.allocated_above, self.reserved_above)


NO_ADDRESS_BAR = AddressBar()


def address_bar(trace: MemoryTrace, device: int) -> AddressBar:
    """Replay a device's requests with its segments at other addresses.

    Expandable segments have none: each has one range of addresses, whatever the driver does.

    Args:
        device: index of the card.

    Raises:
        TraceFormatError: the trace contradicts itself.
    """
    rehearsal = Rehearsal(trace, device)
    if rehearsal.config.expandable_segments or len(rehearsal.plan.sizes) > _LONGEST:
        return NO_ADDRESS_BAR
    count = max(_LEAST, min(_REPLAYS, _EVENTS // max(1, len(rehearsal.plan.sizes))))
    first = rehearsal.what_if(rehearsal.config)
    plain, peaks = _peaks(first), [_peaks(first)]
    for number in range(count):
        player = _replayed(rehearsal, number, rehearsal.capacity.known)
        if player.ooms > first.ooms:  # a request that was not served would be missing in the peak
            player = _replayed(rehearsal, number, None)
        peaks.append(_peaks(player))
    allocated, reserved = zip(*peaks, strict=True)
    return AddressBar(
        allocated_below=_SPANS * (plain[0] - min(allocated)),
        allocated_above=_SPANS * (max(allocated) - plain[0]),
        reserved_below=_SPANS * (plain[1] - min(reserved)),
        reserved_above=_SPANS * (max(reserved) - plain[1]),
    )


def _replayed(rehearsal: Rehearsal, number: int, known: int | None) -> WhatIfPlayer:
    """A replay on a card of so many bytes, or on one without a limit."""
    total = UNKNOWN_TOTAL if known is None else max(1, known)
    draw = _draws(number, _FIRST if number % 2 else None)
    driver = ScatteredDriver(total, draw=draw, rising=number % _RISING == _RISING - 1)
    player = WhatIfPlayer(rehearsal.plan, rehearsal.config, rehearsal.version, total, driver)
    rehearsal.run(player)
    return player


def _draws(seed: int, first: int | None) -> Callable[[], int]:
    """Regions of segments: drawn for the first ones, or for all."""
    generator, drawn = random.Random(seed), 0

    def draw() -> int:
        nonlocal drawn
        drawn += 1
        return generator.randrange(REGIONS) if first is None or drawn <= first else REGIONS - 1

    return draw


def _peaks(player: WhatIfPlayer) -> tuple[int, int]:
    statistics = player.allocator.memory_stats_flat()
    return statistics["allocated_bytes.all.peak"], player.allocator.peak_reserved_bytes
