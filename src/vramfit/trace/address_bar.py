"""How far peaks may be off because nobody knows a driver's addresses: requests replayed with segments elsewhere.

NOTE [Bars of addresses]
Of equal free blocks the caching allocator takes the lowest. So it hangs on the addresses that the driver gives which
block is cut, what is left of it, and whether a later request finds room: the peak of reserved bytes, and that of
allocated bytes, which count what a block has over its request. Recordings of an H100 and an H200 take their first
segments from two or three regions of addresses, each of which falls, in an order that differs from process to process;
later ones fall in one. So runs are replayed with segments drawn from several regions, the first ones alone or all of
them, and the bar is _SPANS times as wide as these differ. It is a bar of what was tried, not a proof. With the addresses
of their recordings, replays of the same requests have the recorded peaks (benchmarks/comparing/addresses.py).
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
"""Replays at most ..."""

_EVENTS = 250_000
"""... and the events that they serve in all."""

_SPANS = 2
"""How many times as wide as the replays differ the bar is: recordings lay about as far."""

_FIRST = 32
"""Segments that half of them draw regions for; the other half draws one for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddressBar:
    """Bytes by which peaks may be lower and higher at other addresses of the driver."""

    allocated_below: int = 0
    allocated_above: int = 0
    reserved_below: int = 0
    reserved_above: int = 0


def address_bar(trace: MemoryTrace, device: int) -> AddressBar:
    """Replay a device's requests with its segments at other addresses.

    Segments that expand have one range of addresses each, whatever the driver does.

    Raises:
        TraceFormatError: the trace contradicts itself.
    """
    rehearsal = Rehearsal(trace, device)
    if rehearsal.config.expandable_segments:
        return AddressBar()
    count = min(_REPLAYS, _EVENTS // max(1, len(rehearsal.plan.sizes)))
    if not count:
        return AddressBar()
    plain = _peaks(rehearsal.what_if(rehearsal.config))
    found = [plain, *(_peaks(_replayed(rehearsal, number)) for number in range(count))]
    allocated, reserved = zip(*found, strict=True)
    return AddressBar(
        allocated_below=_SPANS * (plain[0] - min(allocated)),
        allocated_above=_SPANS * (max(allocated) - plain[0]),
        reserved_below=_SPANS * (plain[1] - min(reserved)),
        reserved_above=_SPANS * (max(reserved) - plain[1]),
    )


def _replayed(rehearsal: Rehearsal, number: int) -> WhatIfPlayer:
    known = rehearsal.capacity.known
    total = UNKNOWN_TOTAL if known is None else max(1, known)
    driver = ScatteredDriver(total, draw=_draws(number, _FIRST if number % 2 else None))
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
