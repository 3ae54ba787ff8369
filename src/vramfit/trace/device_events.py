"""The events of one device, and which of them follow one another at the same address.

A mark is a MARKER event whose ``op`` names the tag; a MARKER without one begins a phase, or a call of an
outermost module in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vramfit.trace.model import EventKind, MemoryTrace, Segment

_BLOCK_BITS = 9  # blocks lie on multiples of 512 bytes


class DeviceEvents:
    """One device's part of a trace, without what is not about memory.

    Attributes:
        rows: the rows of the trace that belong to the device; positions below count in these.
        kinds, addresses, sizes, streams, blocks: the columns at these rows.
    """

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        """Pick out the device's events."""
        self.trace = trace
        self.device = device
        wanted = (trace.device == device) & (trace.kind != EventKind.SNAPSHOT)
        wanted &= trace.kind < EventKind.MARKER
        self.rows = np.flatnonzero(wanted)
        all_rows = len(self.rows) == len(trace)
        pick = slice(None) if all_rows else self.rows
        self.kinds = trace.kind[pick]
        self.addresses = trace.address[pick]
        self.sizes = trace.size[pick]
        self.streams = trace.stream[pick]
        self.blocks = trace.block[pick]

    @cached_property
    def final_segments(self) -> tuple[Segment, ...]:
        """The segments at the end of the trace; none if the trace does not hold them."""
        return tuple(
            segment
            for described in self.trace.devices
            if described.index == self.device
            for segment in described.segments
        )

    @cached_property
    def of_segments(self) -> NDArray[np.bool_]:
        """Which events are about segments rather than blocks."""
        found: NDArray[np.bool_] = (self.kinds >= EventKind.SEGMENT_ALLOC) & (
            self.kinds <= EventKind.SEGMENT_UNMAP
        )
        return found

    @cached_property
    def folded(self) -> NDArray[np.bool_]:
        """Which completions of a free come right after its request."""
        kinds, addresses = self.kinds, self.addresses
        found = np.zeros(len(kinds), dtype=bool)
        found[1:] = (
            (kinds[1:] == EventKind.FREE_COMPLETED)
            & (kinds[:-1] == EventKind.FREE_REQUESTED)
            & (addresses[1:] == addresses[:-1])
        )
        return found

    @cached_property
    def by_address(self) -> NDArray[np.intp]:
        """Positions of the events of blocks, by address and then in order; folded ones are left out."""
        about = np.flatnonzero((self.kinds <= EventKind.FREE_COMPLETED) & ~self.folded)
        addresses = self.addresses[about]
        bits = len(about).bit_length()
        low = int(addresses.min()) if len(about) else 0
        span = (int(addresses.max()) - low) if len(about) else 0
        packable = span.bit_length() - _BLOCK_BITS + bits <= 64
        if packable and not (addresses & ((1 << _BLOCK_BITS) - 1)).any():
            # Address and place in one number: numpy sorts these several times as fast as it sorts stably.
            keys = ((addresses - np.uint64(low)) >> np.uint64(_BLOCK_BITS)) << np.uint64(bits)
            keys |= np.arange(len(about), dtype=np.uint64)
            keys.sort()
            return about[(keys & np.uint64((1 << bits) - 1)).astype(np.intp)]
        return about[np.argsort(addresses, kind="stable")]

    @cached_property
    def continues(self) -> NDArray[np.bool_]:
        """For each entry of `by_address` but the first: whether it has the address of the entry before."""
        addresses = self.addresses[self.by_address]
        same: NDArray[np.bool_] = addresses[1:] == addresses[:-1]
        return same

    @cached_property
    def first_of_address(self) -> NDArray[np.intp]:
        """Positions of the first event of each address, by address."""
        order = self.by_address
        first = np.ones(len(order), dtype=bool)
        first[1:] = ~self.continues
        return order[first]

    @cached_property
    def block_bytes(self) -> NDArray[np.int64]:
        """Bytes of the block of every event; frees without a figure take that of their allocation."""
        kinds, blocks = self.kinds, self.blocks
        missing = (kinds == EventKind.FREE_REQUESTED) & (blocks == 0)
        if not missing.any():
            return blocks
        order = self.by_address
        allocates = kinds[order[:-1]] == EventKind.ALLOC
        pairs = np.flatnonzero(missing[order[1:]] & allocates & self.continues)
        blocks = blocks.copy()
        blocks[order[1:][pairs]] = blocks[order[:-1][pairs]]
        return blocks


# -- The marks that a program set in its trace: `vramfit.snapshot` with a tag --------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A named point in time.

    Attributes:
        row: the event that holds it.
        device: index of the device on which it was set.
        time_us: when, on the clock of the trace.
    """

    tag: str
    row: int
    device: int
    time_us: int


def marks(trace: MemoryTrace) -> tuple[Mark, ...]:
    """The marks of a trace, in order."""
    rows = np.flatnonzero((trace.kind == EventKind.MARKER) & (trace.op >= 0))
    return tuple(
        Mark(
            tag=trace.ops[int(trace.op[row])],
            row=int(row),
            device=int(trace.device[row]),
            time_us=int(trace.time_us[row]),
        )
        for row in rows
    )
