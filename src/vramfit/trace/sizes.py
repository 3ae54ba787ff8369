"""Works out the sizes of blocks, which torch's snapshots do not hold, from requests and from where blocks
lie.

A block is its request rounded up, plus slack: in large classic segments a rest of at most 1 MiB is not split
off but handed out with the block (c10/cuda/CUDACachingAllocator.cpp, ``should_split``). Slack shows as a gap
of at most 1 MiB before whatever lies behind the block at the moment it is taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import SMALL_REQUEST, Rounding
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.events import EventKind
from vramfit.trace.model import MemoryTrace
from vramfit.trace.replay.rewind import StartBlock, StartSegment, start_blocks, start_segments
from vramfit.trace.settings import recorded_config

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
    """Follows the large blocks of a device through its trace and adds to each the slack it was handed out
    with.

    ``bounds`` holds, sorted, where segments end (address * 2) and where blocks in use begin (address * 2 +
    1).
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
