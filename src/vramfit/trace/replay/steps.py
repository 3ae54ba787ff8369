"""Turns the events of a device into the steps of a replay, and shows the driver as it was recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator import Driver
from vramfit.errors import TraceFormatError
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.model import EventKind, Segment
from vramfit.trace.replay.pressure import Pressure
from vramfit.trace.replay.rewind import StartBlock
from vramfit.trace.segments import INACTIVE
from vramfit.trace.settings import recorded_config

# -- A driver that behaves as the recording shows: its addresses in its order, and its failures --------------


SegmentEvent = tuple[int, int, int]
"""Kind, address and size of an event of a segment, or of an OOM."""

# Where nothing was recorded; far from every address that CUDA gives, and within the 47 bits of user space.
_UNRECORDED_BASE = 0x2000_0000_0000
_ALIGNMENT = 2 << 20
_ADDRESS_END = 1 << 47
_BLOCK = 512

_RELEASES = (EventKind.SEGMENT_FREE, EventKind.SEGMENT_UNMAP)


def is_release(event: SegmentEvent) -> bool:
    """Whether an event gives memory back."""
    return event[0] in _RELEASES


class RecordedDriver(Driver):
    """Serves the segment events of a recording, a few at a time as the replay reaches them.

    Where the next recorded event is a release or an OOM, a request for memory fails: that is why the
    allocator released its cache, or gave up.

    Attributes:
        matched: segments and mappings that the allocator asked for as recorded.
        releases_matched: segments and pages that it gave back as recorded.
        surprises: requests and releases that were not recorded at that point.
    """

    def __init__(self, total_bytes: int) -> None:
        """Start with nothing expected."""
        super().__init__(total_bytes)
        self.matched = 0
        self.releases_matched = 0
        self.surprises = 0
        self.free_figure = 0
        self._expected: list[SegmentEvent] = []
        self._held: list[tuple[int, int]] = []  # (begin, end) of all segments and reservations, by address
        self._next_address = _UNRECORDED_BASE

    def expect(self, events: Sequence[SegmentEvent]) -> None:
        """What the recording shows for the next request."""
        self._expected = list(reversed(events))

    def hold(self, address: int, size: int) -> bool:
        """Note that a range is in use; False if it cannot be, because it overlaps another or is no address."""
        begin, end = address, address + size
        if address <= 0 or address % _BLOCK or size % _BLOCK or size <= 0 or end > _ADDRESS_END:
            return False
        index = bisect_left(self._held, (begin, end))
        if index < len(self._held) and self._held[index][0] < end:
            return False
        if index and self._held[index - 1][1] > begin:
            return False
        self._held.insert(index, (begin, end))
        return True

    @property
    def pending(self) -> int:
        """Expected events that have not happened yet."""
        return len(self._expected)

    @property
    def free_bytes(self) -> int:
        """What the recording gives as free, where it does; otherwise what is left of the card."""
        return self.free_figure or super().free_bytes

    def malloc(self, size: int) -> int | None:
        """The recorded address of the next segment; None where the recording shows a failure."""
        if self._expected:
            kind, address, recorded = self._expected[-1]
            if kind in _RELEASES or kind == EventKind.OOM:
                return None
            if kind == EventKind.SEGMENT_ALLOC and recorded == size and self.hold(address, size):
                self._expected.pop()
                self.matched += 1
                return address
        self.surprises += 1
        return self._unrecorded(size) if size <= self.total_bytes else None

    def free(self, address: int, size: int) -> None:
        """Take a segment back."""
        self._let_go(address)
        self._release((EventKind.SEGMENT_FREE, address, size))

    def reserve(self, size: int) -> int:
        """The address of the mapping that comes next: a reservation is mapped from its beginning."""
        if self._expected and self._expected[-1][0] == EventKind.SEGMENT_MAP:
            address = self._expected[-1][1]
            # Its first page stands for it: how far it reaches depends on the card, which recordings do not name.
            if self.hold(address, _ALIGNMENT):
                return address
        self.surprises += 1
        address = self._unrecorded(size) or 0
        if not address:
            raise TraceFormatError("the recording makes no sense: it maps more than any address space holds")
        return address

    def release(self, address: int, size: int) -> None:  # noqa: ARG002
        """Take a reservation back; recordings do not show it."""
        self._let_go(address)

    def map(self, address: int, size: int) -> bool:
        """Map pages; False where the recording shows a failure."""
        if self._expected:
            kind, recorded_address, recorded = self._expected[-1]
            if kind in _RELEASES or kind == EventKind.OOM:
                return False
            if kind == EventKind.SEGMENT_MAP and (recorded_address, recorded) == (address, size):
                self._expected.pop()
                self.matched += 1
                return True
        self.surprises += 1
        return size <= self.total_bytes

    def unmap(self, address: int, size: int) -> None:
        """Take pages back."""
        self._release((EventKind.SEGMENT_UNMAP, address, size))

    def _release(self, event: SegmentEvent) -> None:
        # Within one run of releases the order is the allocator's own business.
        for index in range(len(self._expected) - 1, -1, -1):
            if self._expected[index][0] not in _RELEASES:
                break
            if self._expected[index] == event:
                del self._expected[index]
                self.releases_matched += 1
                return
        self.surprises += 1

    def _unrecorded(self, size: int) -> int | None:
        address = self._next_address
        self._next_address += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self.hold(address, size):
            return address
        if self._next_address > _ADDRESS_END:
            self._next_address = address
            return None
        return self._unrecorded(size)

    def _let_go(self, address: int) -> None:
        index = bisect_left(self._held, (address, 0))
        if index < len(self._held) and self._held[index][0] == address:
            del self._held[index]


FREE, SPECIAL = 0, -1
"""What stands for a step's size where it is no request: a free that completes at once, and everything else."""

PoolId = tuple[int, int]
_COMMON: PoolId = (0, 0)


class Special(NamedTuple):
    """A step that is more than one call.

    Attributes:
        kind: what the event is: ALLOC, FREE_REQUESTED (that completes later), FREE_COMPLETED, OOM, or
            SEGMENT_FREE for releases that belong to no request (``empty_cache``).
        size, stream: what is asked for.
        events: the segment events that the recording shows before it.
        pool: the private pool that serves the request.
        empties: the program emptied the cache right before the request.
    """

    kind: EventKind
    size: int = 0
    stream: int = 0
    events: Sequence[SegmentEvent] = ()
    pool: PoolId = _COMMON
    empties: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplaySteps:
    """The steps of one device.

    Attributes:
        stream: the stream that most requests are made on.
        dropped: positions of frees of blocks that nothing is known of.
        addresses, sizes: one entry for each step; where the size is above 0, the step is a request on ``stream``
            that no segment event precedes, otherwise the size is FREE or SPECIAL.
        specials: one for each SPECIAL step, in order.
        allocations, plain_allocations: all requests, and those that are no special step.
        segments, releases: recorded segment events that take and that give back.
        unknown_frees: frees among ``dropped``, a request and its completion counted as one.
        lowest_mappings: lowest address mapped within the trace by (stream, small pool).
    """

    device: int
    stream: int
    dropped: NDArray[np.intp]
    addresses: list[int]
    sizes: list[int]
    specials: list[Special]
    allocations: int
    plain_allocations: int
    segments: int
    releases: int
    ooms: int
    unknown_frees: int
    lowest_mappings: Mapping[tuple[int, bool], int]


def plan_replay(
    events: DeviceEvents, start: Sequence[Segment], blocks: Sequence[StartBlock], pressure: Pressure
) -> ReplaySteps:
    """The steps that replay a device from the state ``start``; ``blocks`` are what is in use there."""
    kinds, addresses, of_segment = events.kinds, events.addresses, events.of_segments
    sizes = events.sizes
    unknown = _unknown_blocks(start, blocks)
    dropped = _frees_of(events, unknown)
    at_once = _completes_at_once(events)
    left_out = of_segment | events.folded
    left_out[dropped] = True
    kept = np.flatnonzero(~left_out)
    stream = _main_stream(events)
    steps = np.full(len(kept), SPECIAL, dtype=np.int64)
    plain = (kinds[kept] == EventKind.ALLOC) & (events.streams[kept] == stream) & (sizes[kept] > 0)
    steps[plain] = sizes[kept[plain]]
    steps[at_once[kept]] = FREE
    groups = _segment_groups(events, kept)
    pools = _pools(events, kept)
    builder = _Builder(events, kept, groups, pools, pressure)
    for step in sorted({*np.flatnonzero(steps == SPECIAL).tolist(), *groups, *pools}):
        if step < len(kept):
            builder.add(step, steps)
    if len(kept) in groups:
        builder.release(len(kept), [event for _, event in groups[len(kept)]])
    at = addresses[kept]
    if builder.inserted:
        steps, at = np.insert(steps, builder.inserted, SPECIAL), np.insert(at, builder.inserted, 0)
    count = np.bincount(kinds, minlength=len(EventKind)).tolist()
    return ReplaySteps(
        device=events.device,
        stream=stream,
        dropped=dropped,
        addresses=at.tolist(),
        sizes=steps.tolist(),
        specials=builder.specials,
        allocations=count[EventKind.ALLOC],
        plain_allocations=int((steps > 0).sum()),
        segments=count[EventKind.SEGMENT_ALLOC] + count[EventKind.SEGMENT_MAP],
        releases=count[EventKind.SEGMENT_FREE] + count[EventKind.SEGMENT_UNMAP],
        ooms=count[EventKind.OOM],
        unknown_frees=len(unknown),
        lowest_mappings=_lowest_mappings(events),
    )


class _Builder:
    """Writes down the special steps, and where steps have to be inserted for releases of their own."""

    def __init__(
        self,
        events: DeviceEvents,
        kept: NDArray[np.intp],
        groups: Mapping[int, list[tuple[int, SegmentEvent]]],
        pools: Mapping[int, PoolId],
        pressure: Pressure,
    ) -> None:
        self.events = events
        self.pressure = pressure
        self.kept = kept
        self.groups = groups
        self.pools = pools
        self.specials: list[Special] = []
        self.inserted: list[int] = []

    def add(self, step: int, steps: NDArray[np.int64]) -> None:
        position = self.kept[step]
        kind = EventKind(int(self.events.kinds[position]))
        found = self.groups.get(step) or []
        group = [event for _, event in found]
        if group and kind not in (EventKind.ALLOC, EventKind.OOM):
            self.release(step, group)
            group = []
            if steps[step] != SPECIAL:
                return
        steps[step] = SPECIAL
        if kind == EventKind.OOM:
            group = [*group, (int(EventKind.OOM), 0, 0)]
        self.specials.append(
            Special(
                kind,
                size=int(self.events.sizes[position]),
                stream=int(self.events.streams[position]),
                events=group,
                pool=self.pools.get(step, _COMMON),
                empties=bool(group) and is_release(group[0]) and self.pressure.asked_for(found[0][0]),
            )
        )

    def release(self, step: int, group: Sequence[SegmentEvent]) -> None:
        self.inserted.append(step)
        self.specials.append(Special(EventKind.SEGMENT_FREE, events=group))


def _main_stream(events: DeviceEvents) -> int:
    streams = events.streams[events.kinds == EventKind.ALLOC]
    if not len(streams) or not streams.any():
        return 0
    found, counts = np.unique(streams, return_counts=True)
    return int(found[counts.argmax()])


def _unknown_blocks(start: Sequence[Segment], blocks: Sequence[StartBlock]) -> list[StartBlock]:
    """Blocks freed in the trace at addresses that neither the trace nor the start state hold."""
    known = {
        block["address"] for segment in start for block in segment["blocks"] if block["state"] != INACTIVE
    }
    return [block for block in blocks if block.freed >= 0 and block.address not in known]


def _frees_of(events: DeviceEvents, unknown: Sequence[StartBlock]) -> NDArray[np.intp]:
    """Positions of the frees of these blocks, with the completions that follow them."""
    kinds, addresses = events.kinds, events.addresses
    positions = []
    for block in unknown:
        positions.append(block.freed)
        if kinds[block.freed] == EventKind.FREE_REQUESTED:
            later = np.flatnonzero(addresses[block.freed + 1 :] == block.address)
            if len(later) and kinds[block.freed + 1 + later[0]] == EventKind.FREE_COMPLETED:
                positions.append(block.freed + 1 + int(later[0]))
    return np.array(sorted(positions), dtype=np.intp)


def _completes_at_once(events: DeviceEvents) -> NDArray[np.bool_]:
    """Which frees take effect at once: all but those that wait for another stream."""
    requests: NDArray[np.bool_] = events.kinds == EventKind.FREE_REQUESTED
    if not (events.kinds == EventKind.FREE_COMPLETED).any():
        return requests  # a trace that does not tell the two apart
    at_once = np.zeros(len(requests), dtype=bool)
    at_once[:-1] = events.folded[1:]
    if (requests & ~at_once).any():
        # An address that is handed out again was free before, whether the trace holds the completion or not.
        order = events.by_address
        reused = events.continues & requests[order[:-1]] & (events.kinds[order[1:]] == EventKind.ALLOC)
        at_once[order[:-1][reused]] = True
    return at_once


def _segment_groups(
    events: DeviceEvents, kept: NDArray[np.intp]
) -> dict[int, list[tuple[int, SegmentEvent]]]:
    """For each step: the segment events between it and the step before, with their positions."""
    groups: dict[int, list[tuple[int, SegmentEvent]]] = {}
    at = np.flatnonzero(events.of_segments)
    for step, position, kind, address, size in zip(
        np.searchsorted(kept, at).tolist(),
        at.tolist(),
        events.kinds[at].tolist(),
        events.addresses[at].tolist(),
        events.sizes[at].tolist(),
        strict=True,
    ):
        groups.setdefault(step, []).append((position, (kind, address, size)))
    return groups


def _pools(events: DeviceEvents, kept: NDArray[np.intp]) -> dict[int, PoolId]:
    """The private pool of each request that one serves, by the segment that the block lies in.

    The recording names the pools of the segments that it ends with. A request from before such a segment was taken was
    served by another one, whose addresses the driver handed out again.
    """
    requests = np.flatnonzero(events.kinds[kept] == EventKind.ALLOC)
    positions = kept[requests]
    addresses = events.addresses[positions]
    taken = np.flatnonzero(events.kinds == EventKind.SEGMENT_ALLOC)
    since = dict(zip(events.addresses[taken].tolist(), taken.tolist(), strict=True))  # the last one counts
    found: dict[int, PoolId] = {}
    for segment in events.final_segments:
        if segment["segment_pool_id"] == _COMMON:
            continue
        begin = segment["address"]
        first = int(np.searchsorted(positions, since.get(begin, 0)))
        later = addresses[first:]
        inside = first + np.flatnonzero((later >= begin) & (later < begin + segment["total_size"]))
        found.update(dict.fromkeys(requests[inside].tolist(), segment["segment_pool_id"]))
    return found


def _lowest_mappings(events: DeviceEvents) -> dict[tuple[int, bool], int]:
    """The lowest address that was mapped, by stream and pool (known by the size of its pages)."""
    lowest: dict[tuple[int, bool], int] = {}
    mapped = np.flatnonzero(events.kinds == EventKind.SEGMENT_MAP)
    page = recorded_config(events.trace).large_segment_size
    for address, size, stream in zip(
        events.addresses[mapped].tolist(),
        events.sizes[mapped].tolist(),
        events.streams[mapped].tolist(),
        strict=True,
    ):
        key = (stream, bool(size % page))
        lowest[key] = min(address, lowest.get(key, address))
    return lowest
