"""What a recording leaves out of a device: the segments and blocks at its start, and the sizes of blocks.

NOTE [The start of a recording]
A recording is usually switched on when the allocator is warm already. Its final segments and its events
determine what was there before: the first event of an address says whether a block was alive, the last segments minus
what was taken plus what was given back are the first ones.

NOTE [The sizes of blocks]
torch's snapshots do not hold them. A block is its request rounded up, plus slack: in large classic segments a rest of
at most 1 MiB is not split off but handed out with the block (c10/cuda/CUDACachingAllocator.cpp, ``should_split``).
Slack shows as a gap of at most 1 MiB before whatever lies behind the block at the moment it is taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import MIN_BLOCK, SMALL_REQUEST, Rounding
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.model import EventKind, MemoryTrace, Segment
from vramfit.trace.segments import ALLOCATED, INACTIVE, PENDING, SMALL_SEGMENT
from vramfit.trace.settings import recorded_config


@dataclass(frozen=True, kw_only=True, slots=True)
class StartBlock:
    """A block that was in use when the trace began.

    Attributes:
        requested: bytes that were asked for.
        size: bytes of the block; 0 if it was freed within the trace and the trace does not hold it.
        state: as torch's snapshots call it.
        freed: position of its first event among the device's; -1 if it is still in use at the end.
    """

    address: int
    requested: int
    size: int
    state: str
    freed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartSegment:
    """A segment, or a mapped stretch of an expandable one, that was there when the trace began."""

    address: int
    size: int
    stream: int
    small: bool
    pool_id: tuple[int, int]
    expandable: bool

    @property
    def end(self) -> int:
        """First address after it."""
        return self.address + self.size


def start_blocks(events: DeviceEvents) -> list[StartBlock]:
    """The blocks of a device that were in use before its first event, by address."""
    first = events.first_of_address
    kinds = events.kinds[first]
    freed = first[kinds != EventKind.ALLOC]
    found = {}
    for position, address, size, block, kind in zip(
        freed.tolist(),
        events.addresses[freed].tolist(),
        events.sizes[freed].tolist(),
        events.blocks[freed].tolist(),
        events.kinds[freed].tolist(),
        strict=True,
    ):
        state = ALLOCATED if kind == EventKind.FREE_REQUESTED else PENDING
        found[address] = StartBlock(address=address, requested=size, size=block, state=state, freed=position)
    born_later: set[int] = set()
    if events.final_segments:
        born_later.update(events.addresses[first[kinds == EventKind.ALLOC]].tolist())
    for segment in events.final_segments:
        for block in segment["blocks"]:
            address = block["address"]
            if block["state"] != INACTIVE and address not in found and address not in born_later:
                found[address] = StartBlock(
                    address=address,
                    requested=block["requested_size"],
                    size=block["size"],
                    state=block["state"],
                    freed=-1,
                )
    return [found[address] for address in sorted(found)]


def start_segments(events: DeviceEvents) -> list[StartSegment]:
    """The segments of a device before its first event, by address."""
    final = events.final_segments
    backwards = np.flatnonzero(events.of_segments)[::-1]
    at_start = {
        segment["address"]: StartSegment(
            address=segment["address"],
            size=segment["total_size"],
            stream=segment["stream"],
            small=segment["segment_type"] == "small",
            pool_id=segment["segment_pool_id"],
            expandable=False,
        )
        for segment in final
        if not segment["is_expandable"]
    }
    mappings = []
    for position, kind, address, size, stream in zip(
        backwards.tolist(),
        events.kinds[backwards].tolist(),
        events.addresses[backwards].tolist(),
        events.sizes[backwards].tolist(),
        events.streams[backwards].tolist(),
        strict=True,
    ):
        if kind == EventKind.SEGMENT_ALLOC:
            at_start.pop(address, None)
        elif kind == EventKind.SEGMENT_FREE:
            at_start[address] = StartSegment(
                address=address,
                size=size,
                stream=stream,
                small=size == SMALL_SEGMENT,
                pool_id=(0, 0),
                expandable=False,
            )
        else:
            mappings.append(position)
    expandable = [segment for segment in final if segment["is_expandable"]]
    mapped = _mapped_at_start(events, mappings, expandable) if mappings or expandable else []
    return sorted([*at_start.values(), *mapped], key=lambda segment: segment.address)


def _mapped_at_start(events: DeviceEvents, backwards: list[int], final: list[Segment]) -> list[StartSegment]:
    """Undo the mappings: what is mapped at the end, without what was mapped, with what was unmapped."""
    lows = events.addresses[backwards].tolist()
    highs = [low + size for low, size in zip(lows, events.sizes[backwards].tolist(), strict=True)]
    marks = {*lows, *highs}
    for segment in final:
        marks |= {segment["address"], segment["address"] + segment["total_size"]}
    edges = sorted(marks)
    # One entry for each stretch between two edges: what it belongs to, or None where nothing is mapped.
    owner: list[tuple[int, bool, tuple[int, int]] | None] = [None] * len(edges)

    def paint(low: int, high: int, value: tuple[int, bool, tuple[int, int]] | None) -> None:
        first, last = bisect_left(edges, low), bisect_left(edges, high)
        owner[first:last] = [value] * (last - first)

    for segment in final:
        key = (segment["stream"], segment["segment_type"] == "small", segment["segment_pool_id"])
        paint(segment["address"], segment["address"] + segment["total_size"], key)
    large_page = recorded_config(events.trace).large_segment_size
    kinds, streams = events.kinds[backwards].tolist(), events.streams[backwards].tolist()
    for kind, stream, low, high in zip(kinds, streams, lows, highs, strict=True):
        small = bool((high - low) % large_page)
        paint(low, high, (stream, small, (0, 0)) if kind == EventKind.SEGMENT_UNMAP else None)
    found: list[StartSegment] = []
    for low, high, owned in zip(edges, edges[1:], owner, strict=False):
        if owned is None:
            continue
        stream, small, pool_id = owned
        if found and found[-1].end == low and (found[-1].stream, found[-1].small, found[-1].pool_id) == owned:
            low = found.pop().address
        found.append(
            StartSegment(
                address=low, size=high - low, stream=stream, small=small, pool_id=pool_id, expandable=True
            )
        )
    return found


def start_state(blocks: list[StartBlock], segments: list[StartSegment], device: int) -> list[dict[str, Any]]:
    """The start as segments in the form of torch's snapshots; blocks outside all segments are left out."""
    starts = [segment.address for segment in segments]
    inside: list[list[StartBlock]] = [[] for _ in segments]
    for block in blocks:
        index = bisect_right(starts, block.address) - 1
        if index >= 0 and block.address < segments[index].end and not block.address % MIN_BLOCK:
            inside[index].append(block)
    return [_segment(segment, held, device) for segment, held in zip(segments, inside, strict=True)]


def _segment(segment: StartSegment, held: list[StartBlock], device: int) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    cursor = segment.address

    def add(size: int, requested: int, state: str) -> None:
        nonlocal cursor
        if size > 0:
            entries.append({"address": cursor, "size": size, "requested_size": requested, "state": state})
            cursor += size

    for position, block in enumerate(held):
        add(block.address - cursor, 0, INACTIVE)
        room = (held[position + 1].address if position + 1 < len(held) else segment.end) - block.address
        add(min(-(-block.size // MIN_BLOCK) * MIN_BLOCK, room), block.requested, block.state)
    add(segment.end - cursor, 0, INACTIVE)
    in_use = [entry for entry in entries if entry["state"] != INACTIVE]
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(entry["size"] for entry in in_use if entry["state"] == ALLOCATED),
        "active_size": sum(entry["size"] for entry in in_use),
        "requested_size": sum(entry["requested_size"] for entry in in_use),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.expandable,
        "blocks": entries,
    }


# -- Sizes: see NOTE [The sizes of blocks] -------------------------------------------------------------------


_FAR = 1 << 62
"""Room where nothing is known to come."""


def fill_block_sizes(trace: MemoryTrace) -> MemoryTrace:
    """The trace with ``block`` filled in on all allocations and frees that lack it."""
    about_blocks = trace.kind <= EventKind.FREE_COMPLETED
    if not (about_blocks & (trace.block == 0)).any():
        return trace
    config = recorded_config(trace)
    blocks = trace.block.copy()
    for device in np.unique(trace.device[about_blocks]).tolist():
        events = DeviceEvents(trace, device)
        wanted = events.rows[(events.kinds <= EventKind.FREE_COMPLETED) & (events.blocks == 0)]
        blocks[wanted] = round_sizes(trace.size[wanted], config)
        segments = start_segments(events)
        is_expandable = bool((events.kinds == EventKind.SEGMENT_MAP).any()) or any(
            segment.expandable for segment in segments
        )
        if not is_expandable:
            _Slack(events, config, segments, blocks).add()
    return replace(trace, block=blocks)


def round_sizes(sizes: NDArray[np.int64], config: AllocatorConfig) -> NDArray[np.int64]:
    """Requests rounded up to blocks."""
    rounding = Rounding(config)
    distinct, inverse = np.unique(sizes, return_inverse=True)
    rounded = np.array([rounding.block(size) for size in distinct.tolist()], dtype=np.int64)
    return rounded[inverse] if len(rounded) else sizes.copy()


class _Slack:
    """Follows the large blocks of a device through its trace and adds the slack of each.

    ``bounds`` holds, sorted, where segments end (address * 2) and where blocks in use begin (address * 2 + 1).
    """

    def __init__(
        self,
        events: DeviceEvents,
        config: AllocatorConfig,
        segments: list[StartSegment],
        blocks: NDArray[np.int64],
    ) -> None:
        self.trace = events.trace
        self.blocks = blocks
        self.max_split = config.max_split_size
        start = start_blocks(events)
        requests = np.array([block.requested for block in start], dtype=np.int64)
        large = [
            (block, rounded)
            for block, rounded in zip(start, round_sizes(requests, config).tolist(), strict=True)
            if rounded > SMALL_REQUEST
        ]
        self.bounds = sorted(
            {segment.end * 2 for segment in segments} | {block.address * 2 + 1 for block, _ in large}
        )
        self.size_of: dict[int, int] = {}
        self.open: dict[int, int] = {}
        for block, rounded in large:
            self._start(block, rounded)
        rows, kinds = events.rows, events.kinds
        of_blocks = (blocks[rows] > SMALL_REQUEST) & (kinds <= EventKind.FREE_COMPLETED)
        of_segments = (kinds == EventKind.SEGMENT_ALLOC) | (kinds == EventKind.SEGMENT_FREE)
        self.rows = rows[of_blocks | of_segments]

    def _start(self, block: StartBlock, rounded: int) -> None:
        room = self._room(block.address)
        if block.size:
            self.size_of[block.address] = block.size
        elif 0 <= room - rounded <= SMALL_REQUEST:
            self.size_of[block.address] = room
        else:
            # Free memory lies behind it. Where that begins shows when some of it is handed out.
            self.size_of[block.address] = self.open[block.address] = rounded

    def add(self) -> None:
        """Add the slack to all blocks, on the rows of their allocations and of their frees."""
        trace, rows, found = self.trace, self.rows, []
        for kind, address, size, block in zip(
            trace.kind[rows].tolist(),
            trace.address[rows].tolist(),
            trace.size[rows].tolist(),
            self.blocks[rows].tolist(),
            strict=True,
        ):
            if kind == EventKind.ALLOC:
                block = self._take(address, block)
            elif kind == EventKind.FREE_REQUESTED:
                block = self.size_of.get(address, block)
            elif kind == EventKind.FREE_COMPLETED:
                self._remove(address * 2 + 1)
                self.open.pop(address, None)
                block = self.size_of.pop(address, block)
            elif kind == EventKind.SEGMENT_ALLOC:
                self._insert((address + size) * 2)
            else:
                self._remove((address + size) * 2)
            found.append(block)
        unknown = trace.block[rows] == 0
        self.blocks[rows[unknown]] = np.array(found, dtype=np.int64)[unknown]

    def _take(self, address: int, rounded: int) -> int:
        if self.open:
            self._settle(address)
        room = self._room(address)
        size = rounded
        if rounded < room < _FAR:
            whole = self.max_split is not None and rounded >= self.max_split
            if whole or room - rounded <= SMALL_REQUEST:
                size = room
        self._insert(address * 2 + 1)
        self.size_of[address] = size
        return size

    def _settle(self, address: int) -> None:
        """A block is taken from the beginning of free memory, so whatever lies before it ends there."""
        index = bisect_left(self.bounds, address * 2 + 1) - 1
        before = self.bounds[index] >> 1 if index >= 0 else -1
        rounded = self.open.get(before)
        if rounded is not None and 0 <= address - before - rounded <= SMALL_REQUEST:
            self.size_of[before] = address - before
            del self.open[before]

    def _room(self, address: int) -> int:
        """Bytes to whatever comes behind ``address``."""
        bounds = self.bounds
        index = bisect_right(bounds, address * 2 + 1)
        return (bounds[index] >> 1) - address if index < len(bounds) else _FAR

    def _insert(self, bound: int) -> None:
        index = bisect_left(self.bounds, bound)
        if index == len(self.bounds) or self.bounds[index] != bound:
            self.bounds.insert(index, bound)

    def _remove(self, bound: int) -> None:
        index = bisect_left(self.bounds, bound)
        if index < len(self.bounds) and self.bounds[index] == bound:
            del self.bounds[index]
