"""Predicted requests with segments where the card had them: what of an error is left when addresses are known.

Of equal free blocks the caching allocator takes the lowest, so peaks hang on the addresses that a driver gives, which
differ from process to process. Here the k-th segment of a size lies where the recording's k-th of that size lay.
"""

from __future__ import annotations

from collections import defaultdict, deque

from vramfit.allocator import Driver
from vramfit.allocator.driver import PAGE_BYTES
from vramfit.trace.model import EventKind, MemoryTrace
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.trace.replay.replaying import UNKNOWN_TOTAL, Rehearsal


class RecordedAddresses(Driver):
    """A card that gives addresses of a recording, size by size in its order; its own ones where these have run out."""

    def __init__(self, total_bytes: int, recorded: MemoryTrace) -> None:
        super().__init__(total_bytes)
        self._given: set[int] = set()
        self._recorded: defaultdict[int, deque[int]] = defaultdict(deque)
        for row in range(len(recorded)):
            if recorded.kind[row] == EventKind.SEGMENT_ALLOC:
                self._recorded[int(recorded.size[row])].append(int(recorded.address[row]))

    def malloc(self, size: int) -> int | None:
        """The recording's next address for so many bytes."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        if not self._recorded[size]:
            return super().malloc(size)
        if not self._claim(pages):
            return None
        address = self._recorded[size].popleft()
        self._given.add(address)
        return address

    def free(self, address: int, size: int) -> None:
        """Give back what `malloc` gave."""
        if address not in self._given:
            super().free(address, size)
            return
        self._given.remove(address)
        self.mapped_bytes -= -(-size // PAGE_BYTES) * PAGE_BYTES


def peaks_at_recorded_addresses(recorded: MemoryTrace, predicted: MemoryTrace) -> tuple[int, int]:
    """Peaks of allocated and of reserved bytes of the predicted requests, of device 0.

    Raises:
        TraceFormatError: the prediction contradicts itself.
    """
    rehearsal = Rehearsal(predicted, 0)
    known = rehearsal.capacity.known
    total = UNKNOWN_TOTAL if known is None else max(1, known)
    driver = RecordedAddresses(total, recorded)
    player = WhatIfPlayer(rehearsal.plan, rehearsal.config, rehearsal.version, total, driver)
    rehearsal.run(player)
    statistics = player.allocator.memory_stats_flat()
    return statistics["allocated_bytes.all.peak"], player.allocator.peak_reserved_bytes
