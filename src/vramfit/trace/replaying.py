"""Replays a trace's requests through the allocator, and compares what comes out with the recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator import AllocatorConfig
from vramfit.trace.events import EventKind, Segment
from vramfit.trace.model import MemoryTrace
from vramfit.trace.plan import Plan, plan_replay
from vramfit.trace.players import ExactPlayer, Player, WhatIfPlayer
from vramfit.trace.report import DeviceReplay, Peaks, ReplayReport
from vramfit.trace.rewind import final_segments, start_blocks, start_segments, start_state
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config, recorded_version
from vramfit.trace.sizes import fill_block_sizes
from vramfit.units import TIB

_UNKNOWN_TOTAL = 16 * TIB
"""Memory of a card that nothing is known of: no request fails but where the recording says so."""


def replay(trace: MemoryTrace, config: AllocatorConfig | None = None) -> ReplayReport:
    """Serve a trace's requests with the allocator, from the state in which the trace begins.

    With the recorded settings the driver gives the recorded addresses and fails where the recording shows it,
    and everything is compared. With other settings the card is a fresh one: the blocks of the start are
    allocated first, and the peaks say what the other settings would have changed. The card's size is then the
    one the trace names, or follows from an OOM in it; otherwise it is unlimited.

    Args:
        trace: the recording.
        config: settings of the allocator; None for those of the recording.
    """
    began = time.perf_counter()
    recorded = recorded_config(trace)
    what_if = config is not None and config != recorded
    used = recorded if config is None else config
    indices = sorted(
        {*np.unique(trace.device).tolist(), *(device.index for device in trace.devices if device.segments)}
    )
    if any(not block.size for index in indices for block in start_blocks(trace, index)):
        trace = fill_block_sizes(trace)
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
    start = start_state(start_blocks(trace, index), start_segments(trace, index), index)
    plan = plan_replay(trace, index, start)
    curves = _Curves(trace, plan, start)
    total = _total_bytes(trace, index, curves)
    version = recorded_version(trace)
    exact = None if what_if else ExactPlayer(plan, config, version, total or _UNKNOWN_TOTAL)
    player: Player = exact or WhatIfPlayer(plan, config, version, total or _UNKNOWN_TOTAL)
    player.begin(start)
    player.run()
    recorded_final, allocator = final_segments(trace, index), player.allocator

    def compared(figure: Callable[[ExactPlayer], int]) -> int | None:
        return None if exact is None else figure(exact)

    return DeviceReplay(
        index=index,
        events=len(plan.rows),
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

    def __init__(self, trace: MemoryTrace, plan: Plan, start: Sequence[Segment]) -> None:
        rows = plan.rows
        kinds, sizes = trace.kind[rows], trace.size[rows]
        blocks = _blocks_of(trace, rows)
        taken = np.where(kinds == EventKind.ALLOC, blocks, 0)
        given = np.where(kinds == EventKind.FREE_REQUESTED, blocks, 0)
        grown = np.where((kinds == EventKind.SEGMENT_ALLOC) | (kinds == EventKind.SEGMENT_MAP), sizes, 0)
        shrunk = np.where((kinds == EventKind.SEGMENT_FREE) | (kinds == EventKind.SEGMENT_UNMAP), sizes, 0)
        given[plan.dropped] = 0
        allocated = sum(segment["allocated_size"] for segment in start) + np.cumsum(taken - given)
        self.reserved = sum(segment["total_size"] for segment in start) + np.cumsum(grown - shrunk)
        self.peaks = Peaks(
            peak_allocated=_peak(sum(segment["allocated_size"] for segment in start), allocated),
            peak_reserved=_peak(sum(segment["total_size"] for segment in start), self.reserved),
        )
        failed = kinds == EventKind.OOM
        self.limits = self.reserved[failed] + trace.address[rows][failed].astype(np.int64)


def _peak(start: int, curve: NDArray[np.int64]) -> int:
    return max(start, int(curve.max())) if len(curve) else start


def _blocks_of(trace: MemoryTrace, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Bytes of the block of every event; frees without a figure take that of their allocation."""
    blocks, kinds = trace.block[rows].copy(), trace.kind[rows]
    missing = (kinds == EventKind.FREE_REQUESTED) & (blocks == 0)
    if missing.any():
        about = np.flatnonzero((kinds == EventKind.ALLOC) | missing)
        order = about[np.argsort(trace.address[rows][about], kind="stable")]
        addresses = trace.address[rows][order]
        follows = np.flatnonzero(
            missing[order[1:]] & (kinds[order[:-1]] == EventKind.ALLOC) & (addresses[1:] == addresses[:-1])
        )
        blocks[order[1:][follows]] = blocks[order[:-1][follows]]
    return blocks


def _total_bytes(trace: MemoryTrace, index: int, curves: _Curves) -> int:
    """Memory for the allocator: what the trace names, or what was reserved and free when a request failed."""
    for device in trace.devices:
        if device.index == index and device.total_bytes:
            return device.total_bytes - device.context_bytes
    return int(curves.limits.max()) if len(curves.limits) else 0


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
