"""Replays a trace's requests through the allocator, and compares what comes out with the recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.errors import TraceFormatError
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.events import EventKind, Segment
from vramfit.trace.model import MemoryTrace
from vramfit.trace.plan import Plan, plan_replay
from vramfit.trace.players import ExactPlayer, Player, WhatIfPlayer
from vramfit.trace.report import DeviceReplay, Peaks, ReplayReport
from vramfit.trace.rewind import start_blocks, start_segments, start_state
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config, recorded_version
from vramfit.trace.sizes import fill_block_sizes
from vramfit.units import TIB

_UNKNOWN_TOTAL = 1 * TIB
"""Memory of a card that nothing is known of: no request fails but where the recording says so."""


def replay(trace: MemoryTrace, config: AllocatorConfig | None = None) -> ReplayReport:
    """Serve a trace's requests with the allocator, from the state in which the trace begins.

    With the recorded settings the driver gives the recorded addresses and fails where the recording shows it,
    and everything is compared. With other settings the card is a fresh one: the blocks of the start are
    allocated first, and the peaks say what the other settings would have changed. The card's size is then the
    one the trace names, or follows from an OOM in it; otherwise it is unlimited.

    What a recording cannot tell is guessed: the slack (at most 1 MiB) of a block that was there from before, was
    freed, and had free memory behind it of which nothing was handed out meanwhile; which private pool served a
    segment that is gone at the end. A guess that is wrong shows as a difference.

    Args:
        trace: the recording.
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
    events = DeviceEvents(trace, index)
    blocks = start_blocks(events)
    if not all(block.size for block in blocks):
        trace = fill_block_sizes(trace)
        events = DeviceEvents(trace, index)
        blocks = start_blocks(events)
    start = start_state(blocks, start_segments(events), index)
    plan = plan_replay(events, start, blocks)
    curves = _Curves(events, plan, start)
    total = _total_bytes(events, curves)
    version = recorded_version(trace)
    exact = None if what_if else ExactPlayer(plan, config, version, total or _UNKNOWN_TOTAL)
    player: Player = exact or WhatIfPlayer(plan, config, version, total or _UNKNOWN_TOTAL)
    try:
        player.begin(start)
        player.run()
    except (LookupError, ValueError, AssertionError) as error:
        # What no allocator can have done, such as segments on top of each other, ends in states it does not know.
        raise TraceFormatError(
            f"the recording of device {index} contradicts itself ({type(error).__name__}: {error})",
            "Record it again; if it is torch's own file, please report it",
        ) from error
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
        total_bytes=total,
        recorded=curves.peaks,
        replayed=Peaks(
            peak_allocated=allocator.peak_allocated_bytes, peak_reserved=allocator.peak_reserved_bytes
        ),
        first_difference=player.first_difference,
    )


class _Curves:
    """Allocated and reserved bytes of the recording, from its own figures alone."""

    def __init__(self, events: DeviceEvents, plan: Plan, start: Sequence[Segment]) -> None:
        kinds = events.kinds
        taken = np.zeros(len(EventKind), dtype=np.int64)
        taken[EventKind.ALLOC], taken[EventKind.FREE_REQUESTED] = 1, -1
        changes = taken[kinds] * events.block_bytes
        changes[plan.dropped] = 0
        allocated = sum(segment["allocated_size"] for segment in start)
        reserved = sum(segment["total_size"] for segment in start)
        at = np.flatnonzero(events.of_segments)
        grown = (kinds[at] == EventKind.SEGMENT_ALLOC) | (kinds[at] == EventKind.SEGMENT_MAP)
        held = reserved + np.cumsum(np.where(grown, events.sizes[at], -events.sizes[at]))
        self.peaks = Peaks(
            peak_allocated=allocated + max(0, int(np.cumsum(changes).max(initial=0))),
            peak_reserved=max(reserved, int(held.max(initial=0))),
        )
        failed = np.flatnonzero(kinds == EventKind.OOM)
        before = np.concatenate([[reserved], held])[np.searchsorted(at, failed)]
        self.limits = before + events.addresses[failed].astype(np.int64)


def _total_bytes(events: DeviceEvents, curves: _Curves) -> int:
    """Memory for the allocator: what the trace names, or what was reserved and free when a request failed."""
    for device in events.trace.devices:
        if device.index == events.device and device.total_bytes:
            return device.total_bytes - device.context_bytes
    return int(curves.limits.max(initial=0))


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
