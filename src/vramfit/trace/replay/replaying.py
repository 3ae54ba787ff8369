"""Replays a trace's requests through the allocator, and compares what comes out with the recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.trace.model import MemoryTrace
from vramfit.trace.replay.players import ExactPlayer, Player
from vramfit.trace.replay.rehearsal import Rehearsal
from vramfit.trace.replay.report import DeviceReplay, Peaks, ReplayReport
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config


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
