"""Replays a trace's requests through the allocator, device by device, and compares the outcome with the recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.errors import TraceFormatError
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.model import EventKind, MemoryTrace, Segment
from vramfit.trace.replay.players import ExactPlayer, OomPlayer, Player, WhatIfPlayer
from vramfit.trace.replay.pressure import Capacity, Pressure
from vramfit.trace.replay.rewind import fill_block_sizes, start_blocks, start_segments, start_state
from vramfit.trace.replay.steps import ReplaySteps, plan_replay
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config, recorded_version
from vramfit.units import TIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes at any one time."""

    peak_allocated: int
    peak_reserved: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReplay:
    """One device of a replay. Sizes are in bytes.

    The ``_matched`` figures are None where the replay was not meant to match (other settings than recorded).

    Attributes:
        events: events of the device.
        allocations: requests that were served.
        addresses_matched: requests that got the recorded address.
        segments: segments taken, and stretches of pages mapped.
        segments_matched: those that the replay took at the same request with the same size.
        releases: segments given back, and stretches of pages unmapped.
        releases_matched: those that the replay gave back at the same point.
        final_segments: segments at the end of the recording; 0 if it does not hold them.
        final_segments_matched: those that the replay ends with too, block by block.
        surprises: segments taken or given back by the replay that were not recorded at that point.
        ooms: requests that failed in the recording.
        ooms_replayed: requests that failed in the replay.
        unknown_frees: frees of blocks that nothing is known of.
        total_bytes: memory of the card in the replay, 0 if unknown and taken as unlimited.
        recorded: peaks of the recording, between its first and its last event.
        replayed: peaks of the replay.
        first_difference: the first allocation that differs, in words; None if there is none.
    """

    index: int
    events: int
    allocations: int
    addresses_matched: int | None
    segments: int
    segments_matched: int | None
    releases: int
    releases_matched: int | None
    final_segments: int
    final_segments_matched: int | None
    surprises: int | None
    ooms: int
    ooms_replayed: int
    unknown_frees: int
    total_bytes: int
    recorded: Peaks
    replayed: Peaks
    first_difference: str | None

    @property
    def is_state(self) -> bool:
        """Whether nothing was recorded but what the device held at the end."""
        return not self.events and self.final_segments > 0

    @property
    def exact(self) -> bool:
        """Whether everything that was compared is equal."""
        return (
            self.addresses_matched == self.allocations
            and self.segments_matched == self.segments
            and self.releases_matched == self.releases
            and self.final_segments_matched == self.final_segments
            and self.surprises == 0
            and self.ooms == self.ooms_replayed
            and self.recorded == self.replayed
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        devices: one entry for each device that has events or segments.
        alloc_conf: settings of the replay.
        recorded_alloc_conf: settings of the recording.
        what_if: the settings differ, so that only the peaks can be compared.
    """

    devices: tuple[DeviceReplay, ...]
    alloc_conf: str
    recorded_alloc_conf: str
    what_if: bool
    events: int
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether every device was replayed exactly."""
        return all(device.exact for device in self.devices)


# -- One device, made ready once and served as often as wanted ----------------------------------------------


UNKNOWN_TOTAL = 1 * TIB
"""Memory of a card that nothing is known of: no request fails but where the recording says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The outcome of serving the requests under one configuration.

    Attributes:
        peaks: the most bytes at any time; a lower bound where ``complete`` is False.
        device_allocs: calls of cudaMalloc, or of mapping pages, after the start of the trace.
        device_frees: calls of cudaFree, or of unmapping pages.
        retries: how often the cache was given back because the driver had no memory left.
        complete: every request was served; False when the replay was broken off above ``stop_above``.
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
        start: its segments when the trace begins.
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
        """Serve everything, expecting what was recorded; gives the finished player."""
        player = ExactPlayer(self.plan, self.config, self.version, self._total)
        self.run(player)
        return player

    def what_if(self, config: AllocatorConfig) -> WhatIfPlayer:
        """Serve everything on a fresh card under ``config``; gives the finished player."""
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
        """As `what_if`, with its outcome.

        Args:
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


# -- A trace ------------------------------------------------------------------------------------------------


def replay(trace: MemoryTrace, config: AllocatorConfig | None = None) -> ReplayReport:
    """Serve a trace's requests with the allocator, from the state in which the trace begins.

    With the recorded settings the driver gives the recorded addresses and fails where the recording shows it,
    and everything is compared. With other settings the card is a fresh one: the blocks of the start are
    allocated first, and the peaks say what the other settings would have changed. The card's size is then the
    one the trace names, or follows from an OOM in it, or from requests for which the cache had to be given back
    (see `Pressure`); otherwise it is unlimited.

    What a recording cannot tell is guessed: the slack (at most 1 MiB) of a block that was there from before, was
    freed, and had free memory behind it of which nothing was handed out meanwhile; which private pool served a
    segment that is gone at the end. A guess that is wrong shows as a difference.

    Args:
        config: settings of the allocator; None for those of the recording.

    Raises:
        TraceFormatError: the recording contradicts itself, so that no allocator can have made it.
    """
    began = time.perf_counter()
    recorded = recorded_config(trace)
    what_if = config is not None and config != recorded
    used = recorded if config is None else config
    indices = sorted(
        {*np.unique(trace.device).tolist(), *(device.index for device in trace.devices if device.segments)}
    )
    devices = tuple(_replay_device(trace, index, used, what_if) for index in indices)
    return ReplayReport(
        devices=devices,
        alloc_conf=used.to_string(),
        recorded_alloc_conf=recorded.to_string(),
        what_if=what_if,
        events=len(trace),
        seconds=time.perf_counter() - began,
    )


def _replay_device(trace: MemoryTrace, index: int, config: AllocatorConfig, what_if: bool) -> DeviceReplay:
    rehearsal = Rehearsal(trace, index)
    plan, events = rehearsal.plan, rehearsal.events
    exact = None if what_if else rehearsal.exact()
    player: Player = exact or rehearsal.what_if(config)
    recorded_final, allocator = events.final_segments, player.allocator

    def compared(figure: Callable[[ExactPlayer], int]) -> int | None:
        return None if exact is None else figure(exact)

    return DeviceReplay(
        index=index,
        events=len(events.rows),
        allocations=plan.allocations,
        addresses_matched=compared(lambda player: player.matched),
        segments=plan.segments,
        segments_matched=compared(lambda player: player.driver.matched),
        releases=plan.releases,
        releases_matched=compared(lambda player: player.driver.releases_matched),
        final_segments=len(recorded_final),
        final_segments_matched=compared(
            lambda player: _same_segments(recorded_final, player.allocator.segments())
        ),
        surprises=compared(lambda player: player.driver.surprises),
        ooms=plan.ooms,
        ooms_replayed=player.ooms,
        unknown_frees=plan.unknown_frees + player.unknown_frees,
        total_bytes=rehearsal.capacity.bytes,
        recorded=rehearsal.recorded,
        replayed=Peaks(
            peak_allocated=allocator.peak_allocated_bytes, peak_reserved=allocator.peak_reserved_bytes
        ),
        first_difference=player.first_difference,
    )


def _same_segments(recorded: Sequence[Any], replayed: Sequence[Any]) -> int:
    """How many segments are in both, with the same blocks in the same states."""
    found = {_shape(segment) for segment in replayed}
    return sum(_shape(segment) in found for segment in recorded)


def _shape(segment: Any) -> tuple[Any, ...]:
    blocks = tuple(
        (block["size"], block["state"], block["requested_size"] if block["state"] != INACTIVE else 0)
        for block in segment["blocks"]
    )
    keys = ("address", "total_size", "stream", "segment_type", "is_expandable")
    return (*(segment[key] for key in keys), blocks)
