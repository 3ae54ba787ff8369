"""Turns the events of a device into the steps of a replay, as plain lists for a fast loop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vramfit.trace.events import EventKind, Segment
from vramfit.trace.model import MemoryTrace
from vramfit.trace.recorded import SegmentEvent
from vramfit.trace.rewind import final_segments, rows_of
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config

ALLOC, FREE, SPECIAL = 0, 1, 2
"""Steps: a request that no segment event precedes, a free that completes at once, and everything else."""

PoolId = tuple[int, int]
_COMMON: PoolId = (0, 0)


class Special(NamedTuple):
    """A step that is more than one call.

    Attributes:
        kind: what the event is: ALLOC, FREE_REQUESTED (that completes later), FREE_COMPLETED, OOM, or
            SEGMENT_FREE for releases that belong to no request (``empty_cache``).
        events: the segment events that the recording shows before it.
        pool: the private pool that serves the request.
    """

    kind: EventKind
    events: Sequence[SegmentEvent] = ()
    pool: PoolId = _COMMON


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The steps of one device.

    Attributes:
        device: device index.
        rows: the device's rows of the trace.
        dropped: positions in ``rows`` of frees of blocks that nothing is known of.
        steps, addresses, sizes, streams: one entry for each step; steps are ALLOC, FREE or SPECIAL.
        specials: one for each SPECIAL step, in order.
        allocations, plain_allocations: all requests, and those whose step is ALLOC.
        segments, releases: recorded segment events that take and that give back.
        ooms: requests that failed.
        unknown_frees: frees among ``dropped``.
        lowest_mappings: lowest address mapped within the trace by (stream, small pool).
    """

    device: int
    rows: NDArray[np.intp]
    dropped: NDArray[np.intp]
    steps: list[int]
    addresses: list[int]
    sizes: list[int]
    streams: list[int]
    specials: list[Special]
    allocations: int
    plain_allocations: int
    segments: int
    releases: int
    ooms: int
    unknown_frees: int
    lowest_mappings: Mapping[tuple[int, bool], int]


def plan_replay(trace: MemoryTrace, device: int, start: Sequence[Segment]) -> Plan:
    """The steps that replay a device from the state ``start``."""
    rows = rows_of(trace, device)
    kinds, addresses = trace.kind[rows], trace.address[rows]
    sizes, streams = trace.size[rows], trace.stream[rows]
    dropped = _unknown_frees(kinds, addresses, start)
    of_segment = (kinds >= EventKind.SEGMENT_ALLOC) & (kinds <= EventKind.SEGMENT_UNMAP)
    at_once = _completes_at_once(kinds, addresses)
    # A completion right after its request is part of the free.
    folded = np.zeros(len(rows), dtype=bool)
    folded[1:] = (
        (kinds[1:] == EventKind.FREE_COMPLETED)
        & (kinds[:-1] == EventKind.FREE_REQUESTED)
        & (addresses[1:] == addresses[:-1])
    )
    folded[dropped] = True
    kept = np.flatnonzero(~of_segment & ~folded)
    steps = np.full(len(kept), SPECIAL, dtype=np.int8)
    steps[kinds[kept] == EventKind.ALLOC] = ALLOC
    steps[(kinds[kept] == EventKind.FREE_REQUESTED) & at_once[kept]] = FREE
    groups = _segment_groups(kinds, addresses, sizes, of_segment, kept)
    pools = _pools(trace, device, start, kinds[kept], addresses[kept])
    builder = _Builder(kinds[kept].tolist(), groups, pools)
    for position in sorted({*np.flatnonzero(steps == SPECIAL).tolist(), *groups, *pools}):
        if position < len(kept):
            builder.add(position, steps)
    if len(kept) in groups:
        builder.release(len(kept), groups[len(kept)])

    def column(values: NDArray[Any]) -> list[int]:
        return np.insert(values, builder.inserted, 0).tolist() if builder.inserted else values.tolist()

    grown = (kinds == EventKind.SEGMENT_ALLOC) | (kinds == EventKind.SEGMENT_MAP)
    inserted = np.insert(steps, builder.inserted, SPECIAL) if builder.inserted else steps
    return Plan(
        device=device,
        rows=rows,
        dropped=dropped,
        steps=inserted.tolist(),
        addresses=column(addresses[kept]),
        sizes=column(sizes[kept]),
        streams=column(streams[kept]),
        specials=builder.specials,
        allocations=int((kinds == EventKind.ALLOC).sum()),
        plain_allocations=int((inserted == ALLOC).sum()),
        segments=int(grown.sum()),
        releases=int(of_segment.sum() - grown.sum()),
        ooms=int((kinds == EventKind.OOM).sum()),
        unknown_frees=int((kinds[dropped] == EventKind.FREE_REQUESTED).sum()),
        lowest_mappings=_lowest_mappings(trace, rows[kinds == EventKind.SEGMENT_MAP]),
    )


class _Builder:
    """Writes down the special steps, and where steps have to be inserted for releases of their own."""

    def __init__(
        self, kinds: list[int], groups: Mapping[int, list[SegmentEvent]], pools: Mapping[int, PoolId]
    ) -> None:
        self.kinds = kinds
        self.groups = groups
        self.pools = pools
        self.specials: list[Special] = []
        self.inserted: list[int] = []

    def add(self, position: int, steps: NDArray[np.int8]) -> None:
        kind = EventKind(self.kinds[position])
        events: Sequence[SegmentEvent] = self.groups.get(position, ())
        if events and kind not in (EventKind.ALLOC, EventKind.OOM):
            self.release(position, events)
            events = ()
            if steps[position] != SPECIAL:
                return
        steps[position] = SPECIAL
        if kind == EventKind.OOM:
            events = [*events, (int(EventKind.OOM), 0, 0)]
        self.specials.append(Special(kind, events, self.pools.get(position, _COMMON)))

    def release(self, position: int, events: Sequence[SegmentEvent]) -> None:
        self.inserted.append(position)
        self.specials.append(Special(EventKind.SEGMENT_FREE, events))


def _unknown_frees(
    kinds: NDArray[np.uint8], addresses: NDArray[np.uint64], start: Sequence[Segment]
) -> NDArray[np.intp]:
    """Positions of frees of addresses that neither the trace nor the start state hold."""
    about = np.flatnonzero(kinds <= EventKind.FREE_COMPLETED)
    known = {
        block["address"] for segment in start for block in segment["blocks"] if block["state"] != INACTIVE
    }
    _, first = np.unique(addresses[about], return_index=True)
    frees = about[first[kinds[about[first]] != EventKind.ALLOC]]
    orphans = [
        position
        for position, address in zip(frees.tolist(), addresses[frees].tolist(), strict=True)
        if address not in known
    ]
    completions = []
    for position in orphans:
        if kinds[position] == EventKind.FREE_REQUESTED:
            later = np.flatnonzero(addresses[position + 1 :] == addresses[position])
            if len(later) and kinds[position + 1 + later[0]] == EventKind.FREE_COMPLETED:
                completions.append(position + 1 + int(later[0]))
    return np.array(sorted([*orphans, *completions]), dtype=np.intp)


def _completes_at_once(kinds: NDArray[np.uint8], addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which frees take effect when they are asked for: all but those that wait for another stream."""
    requests: NDArray[np.bool_] = kinds == EventKind.FREE_REQUESTED
    if not (kinds == EventKind.FREE_COMPLETED).any():
        return requests  # a trace that does not tell the two apart
    at_once = np.zeros(len(kinds), dtype=bool)
    at_once[:-1] = requests[:-1] & (kinds[1:] == EventKind.FREE_COMPLETED) & (addresses[1:] == addresses[:-1])
    waiting = np.flatnonzero(requests & ~at_once)
    if len(waiting):
        # An address that is handed out again was free before, whether the trace holds the completion or not.
        about = np.flatnonzero(kinds <= EventKind.FREE_COMPLETED)
        order = about[np.argsort(addresses[about], kind="stable")]
        reused = (
            requests[order[:-1]]
            & (kinds[order[1:]] == EventKind.ALLOC)
            & (addresses[order[1:]] == addresses[order[:-1]])
        )
        at_once[order[:-1][reused]] = True
    return at_once


def _segment_groups(
    kinds: NDArray[np.uint8],
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    of_segment: NDArray[np.bool_],
    kept: NDArray[np.intp],
) -> dict[int, list[SegmentEvent]]:
    """For each step: the segment events between it and the step before."""
    groups: dict[int, list[SegmentEvent]] = {}
    at = np.flatnonzero(of_segment)
    for step, kind, address, size in zip(
        np.searchsorted(kept, at).tolist(),
        kinds[at].tolist(),
        addresses[at].tolist(),
        sizes[at].tolist(),
        strict=True,
    ):
        groups.setdefault(step, []).append((kind, address, size))
    return groups


def _pools(
    trace: MemoryTrace,
    device: int,
    start: Sequence[Segment],
    kinds: NDArray[np.uint8],
    addresses: NDArray[np.uint64],
) -> dict[int, PoolId]:
    """The private pool of each request that one serves, by the segment that the block lies in."""
    private = {
        segment["address"]: segment
        for segment in (*start, *final_segments(trace, device))
        if segment["segment_pool_id"] != _COMMON
    }
    if not private:
        return {}
    begins = sorted(private)
    found = {}
    requests = np.flatnonzero(kinds == EventKind.ALLOC)
    for position, address in zip(requests.tolist(), addresses[requests].tolist(), strict=True):
        index = bisect_right(begins, address) - 1
        segment = private[begins[index]] if index >= 0 else None
        if segment is not None and address < segment["address"] + segment["total_size"]:
            found[position] = segment["segment_pool_id"]
    return found


def _lowest_mappings(trace: MemoryTrace, mapped: NDArray[np.intp]) -> dict[tuple[int, bool], int]:
    page = recorded_config(trace).large_segment_size
    lowest: dict[tuple[int, bool], int] = {}
    for address, size, stream in zip(
        trace.address[mapped].tolist(),
        trace.size[mapped].tolist(),
        trace.stream[mapped].tolist(),
        strict=True,
    ):
        key = (stream, bool(size % page))
        lowest[key] = min(address, lowest.get(key, address))
    return lowest
