"""One device's requests, made ready once and then served as often as wanted: as recorded, or under other settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.errors import TraceFormatError
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.events import EventKind, Segment
from vramfit.trace.model import MemoryTrace
from vramfit.trace.replay.players import ExactPlayer, OomPlayer, Player, WhatIfPlayer
from vramfit.trace.replay.pressure import Capacity, Pressure
from vramfit.trace.replay.report import Peaks
from vramfit.trace.replay.rewind import start_blocks, start_segments, start_state
from vramfit.trace.replay.steps import ReplaySteps, plan_replay
from vramfit.trace.settings import recorded_config, recorded_version
from vramfit.trace.sizes import fill_block_sizes
from vramfit.units import TIB

UNKNOWN_TOTAL = 1 * TIB
"""Memory of a card that nothing is known of: no request fails but where the recording says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What serving the requests under one configuration came to.

    Attributes:
        config: the settings.
        peaks: the most bytes at any time; a lower bound where ``complete`` is False.
        device_allocs: calls of cudaMalloc, or of mapping pages, after the start of the trace.
        device_frees: calls of cudaFree, or of unmapping pages.
        retries: how often the cache was given back because the driver had no memory left.
        ooms: requests that failed.
        complete: every request was served; False when the replay was broken off above ``stop_above``.
        seconds: time the replay took.
    """

    config: AllocatorConfig
    peaks: Peaks
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    complete: bool
    seconds: float


class Rehearsal:
    """The requests of one device, ready to be served.

    Attributes:
        trace: the recording.
        device: device index.
        events: the device's events.
        start: its segments when the trace begins.
        plan: the steps.
        config: the settings that it was recorded with.
        version: the torch version whose rules apply.
        capacity: memory for the allocator.
        recorded: peaks of the recording, from its own figures alone.

    Raises:
        TraceFormatError: when playing: the recording contradicts itself, so that no allocator can have made it.
    """

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        """Rewind the device to the start of the trace and write down its steps."""
        events = DeviceEvents(trace, device)
        blocks = start_blocks(events)
        if not all(block.size for block in blocks):
            trace = fill_block_sizes(trace)
            events = DeviceEvents(trace, device)
            blocks = start_blocks(events)
        self.trace = trace
        self.device = device
        self.events = events
        self.start = start_state(blocks, start_segments(events), device)
        pressure = Pressure(events, self.start)
        self.plan: ReplaySteps = plan_replay(events, self.start, blocks, pressure)
        self.config = recorded_config(trace)
        self.version = recorded_version(trace)
        self.capacity: Capacity = pressure.capacity
        self.recorded = _recorded_peaks(events, self.plan, self.start, pressure.peak_reserved)

    @property
    def _total(self) -> int:
        """Memory of the card to play on; a driver has a byte at least."""
        known = self.capacity.known
        return UNKNOWN_TOTAL if known is None else max(1, known)

    def exact(self) -> ExactPlayer:
        """Serve everything expecting what was recorded; the player when it is through."""
        player = ExactPlayer(self.plan, self.config, self.version, self._total)
        self.run(player)
        return player

    def what_if(self, config: AllocatorConfig) -> WhatIfPlayer:
        """Serve everything on a card of its own under ``config``; the player when it is through."""
        player = WhatIfPlayer(self.plan, config, self.version, self._total)
        self.run(player)
        return player

    def play(
        self,
        config: AllocatorConfig,
        *,
        stop_above: int | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> Played:
        """As `what_if`, with what it came to.

        Args:
            config: the settings.
            stop_above: break off as soon as more bytes than this are reserved.
            tick: called now and then with the share of the steps that is done.
        """
        began = time.perf_counter()
        player = WhatIfPlayer(self.plan, config, self.version, self._total)
        player.stop_above, player.tick = stop_above, tick
        self.run(player)
        allocs, frees, retries = player.counts()
        allocator = player.allocator
        return Played(
            config=config,
            peaks=Peaks(
                peak_allocated=allocator.peak_allocated_bytes, peak_reserved=allocator.peak_reserved_bytes
            ),
            device_allocs=allocs,
            device_frees=frees,
            retries=retries,
            ooms=player.ooms,
            complete=not player.stopped,
            seconds=time.perf_counter() - began,
        )

    def until_oom(self, config: AllocatorConfig, oom: int) -> OomPlayer:
        """Serve under ``config`` up to the request of the ``oom``-th failure (from 0), which is left to the caller."""
        player = OomPlayer(self.plan, config, self.version, self._total, oom)
        self.run(player)
        return player

    def run(self, player: Player) -> None:
        """Let a player serve everything.

        Raises:
            TraceFormatError: the recording contradicts itself.
        """
        try:
            player.begin(self.start)
            player.run()
        except (LookupError, ValueError, AssertionError) as error:
            # What no allocator can have done, such as segments on top of each other, ends in states it does not
            # know.
            raise TraceFormatError(
                f"the recording of device {self.device} contradicts itself ({type(error).__name__}: {error})",
                "Record it again; if it is torch's own file, please report it",
            ) from error


def _recorded_peaks(
    events: DeviceEvents, plan: ReplaySteps, start: Sequence[Segment], peak_reserved: int
) -> Peaks:
    taken = np.zeros(len(EventKind), dtype=np.int64)
    taken[EventKind.ALLOC], taken[EventKind.FREE_REQUESTED] = 1, -1
    changes = taken[events.kinds] * events.block_bytes
    changes[plan.dropped] = 0
    allocated = sum(segment["allocated_size"] for segment in start)
    return Peaks(
        peak_allocated=allocated + max(0, int(np.cumsum(changes).max(initial=0))),
        peak_reserved=peak_reserved,
    )
