"""Why reserved memory is not used: the causes, each with its bytes, its evidence and its remedies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import LARGE_ROUNDING, MIN_BLOCK
from vramfit.analysis._lifetimes import Lifetimes
from vramfit.analysis.accounting import Account, CauseKind, Request, request_at
from vramfit.analysis.breakdown import Moment, moment, oom_row
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.occupancy import COMMON_POOL, Fragmentation, Occupancy, fragmentation, occupancy
from vramfit.analysis.pinning import PinGroup, PinnedSegment, Pins
from vramfit.analysis.pool_use import PoolUse, given_back_by_empty_cache, pools_of
from vramfit.analysis.remedies import Remedy, of_a_state, prove, remedies_for
from vramfit.analysis.shortage import OomExplanation, OomVerdict, WhatIf, explain_oom
from vramfit.trace import Capacity, CapacitySource, EventKind, MemoryTrace, Rehearsal
from vramfit.trace.settings import recorded_config
from vramfit.units import counted, format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentationCause:
    """One cause.

    Attributes:
        bytes: how many bytes are reserved for it; for LIVE_MEMORY what the request lacks even if nothing were
            fragmented.
        count: number of gaps or blocks.
        evidence: what the trace shows of it, in words.
        remedies: what helps, the best first; empty where nothing needs to be done.
    """

    kind: CauseKind
    bytes: int
    count: int
    evidence: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestRequest:
    """What could still be served, in bytes, on the stream of the request by which the causes are judged.

    Attributes:
        from_cache: without asking the driver.
        after_release: by the driver, once the cache has been given back; None if the card's memory is unknown.
    """

    from_cache: int
    after_release: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentationCauses:
    """Why a device reserves more than was asked for, at one moment. Bytes throughout.

    The bytes of all causes but LIVE_MEMORY add up to ``reserved - requested``.

    Attributes:
        requested: bytes asked for in blocks that are allocated.
        request: by what the causes are judged; None if reserved memory never grew within the trace.
        causes: largest first, after the decisive one.
        pins: the live blocks that lie beside free memory, by what they are; not those beside the rest of the newest
            segment alone, which they do not keep from anything.
        segments: the segments with the most pinned free memory, with their history.
        largest: what could still be served.
        capacity: memory of the card for the allocator, and what tells it.
        oom: what would have served the request, if the moment is an out-of-memory.
        pools: the pools at that moment, the largest first.
        is_state: nothing was recorded of the device but what it held when its snapshot was dumped: there is no request
            to judge by, no order in which blocks came, and no setting that could be tried.
    """

    device: int
    moment: Moment
    fragmentation: Fragmentation
    requested: int
    request: Request | None
    causes: tuple[FragmentationCause, ...]
    pins: tuple[PinGroup, ...]
    segments: tuple[PinnedSegment, ...]
    largest: LargestRequest
    capacity: Capacity
    oom: OomExplanation | None
    pools: tuple[PoolUse, ...] = ()
    is_state: bool = False

    @property
    def main(self) -> FragmentationCause | None:
        """The cause to look at first; None where nothing is reserved beyond the requests."""
        return self.causes[0] if self.causes else None

    def cause(self, kind: CauseKind) -> FragmentationCause | None:
        """The cause of one kind, if it occurs."""
        return next((found for found in self.causes if found.kind is kind), None)


_SEGMENTS = 10
_GROUPS = 20
_HARMLESS = (CauseKind.CACHED, CauseKind.SEGMENT_REST)
"""What the allocator gives back, or is about to use: never the cause to look at first if there is another."""


def causes(
    trace: MemoryTrace, device: int = 0, row: int | None = None, *, proven: bool = True
) -> FragmentationCauses:
    """Find out why ``device`` reserves more than was asked for.

    Args:
        row: the moment right after this event; by default the last out-of-memory, or else the request that brought
            the reserved memory to its peak.
        proven: try remedies that are allocator settings by serving the trace's requests under them.

    Raises:
        IndexError: the trace has no such event.
        TraceFormatError: the recording contradicts itself.
    """
    if row is not None and not -1 <= row < len(trace):
        raise IndexError(f"the trace has no event {row}: it has {len(trace)}")
    found = DeviceTimeline.of(trace, device)
    lives = found.lives
    if row is None:
        failed = oom_row(trace, device)
        row = failed if failed is not None else _growth_to_peak(trace, found)
    is_oom = row >= 0 and trace.kind[row] == EventKind.OOM and trace.device[row] == device
    rehearsal = Rehearsal(trace, device)
    oom = explain_oom(trace, lives, row) if is_oom else None
    held = occupancy(trace, lives, row)
    return _Judge(trace, lives, held, rehearsal, oom).judge(proven=proven)


def _growth_to_peak(trace: MemoryTrace, found: DeviceTimeline) -> int:
    """The allocation that brought reserved memory to its peak first; -1 if it was as high before the trace."""
    reserved = found.curves.reserved
    if not len(reserved):
        return -1
    row = int(np.argmax(reserved))
    grows = trace.kind[row] in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP)
    if not grows:
        return row
    after = np.flatnonzero((trace.device[row:] == found.device) & (trace.kind[row:] == EventKind.ALLOC))
    return row + int(after[0]) if len(after) else row


class _Judge:
    """The causes of one moment."""

    def __init__(
        self,
        trace: MemoryTrace,
        lives: Lifetimes,
        held: Occupancy,
        rehearsal: Rehearsal,
        oom: OomExplanation | None,
    ) -> None:
        self.trace, self.lives, self.held, self.oom = trace, lives, held, oom
        self.rehearsal = rehearsal
        self.is_state = trace.is_state(lives.device)
        self.pools = pools_of(held)
        self.config: AllocatorConfig = recorded_config(trace)
        self.request = request_at(trace, lives.device, held.row, self.config, oom)
        self.pins = Pins(trace, lives, held, -1 if self.request is None else self.request.grown)
        self.account = Account(lives, held, self.config, self.request, self.pins, is_state=self.is_state)

    def judge(self, *, proven: bool) -> FragmentationCauses:
        """All about the moment."""
        row, lives = self.held.row, self.lives
        fragments = fragmentation(self.trace, lives, row)
        found = [self._cause(kind) for kind, size in self.account.bytes.items() if size]
        found.sort(key=lambda cause: (cause.kind in _HARMLESS, -cause.bytes, cause.kind.name))
        if self.oom is not None and self.oom.verdict is OomVerdict.NOT_AT_ALL:
            found.insert(0, self._live_memory())
        if proven and not self.is_state:
            found = self._proved(found)
        alive = lives.alive(row)
        return FragmentationCauses(
            device=lives.device,
            moment=moment(self.trace, row),
            fragmentation=fragments,
            requested=int(lives.size[alive].sum()),
            request=self.request,
            causes=tuple(found),
            pins=self.pins.groups(_GROUPS),
            segments=self.pins.worst(_SEGMENTS),
            largest=self._largest(),
            capacity=self.rehearsal.capacity,
            oom=self.oom,
            pools=self.pools,
            is_state=self.is_state,
        )

    def _proved(self, found: list[FragmentationCause]) -> list[FragmentationCause]:
        """The causes with the outcome of their remedies in a replay; remedies that do not help stand last."""
        every = [remedy for cause in found for remedy in cause.remedies]
        tried = prove(self.rehearsal, every)
        return [
            replace(
                cause,
                remedies=tuple(
                    sorted((tried[remedy] for remedy in cause.remedies), key=lambda one: one.helps is False)
                ),
            )
            for cause in found
        ]

    def _largest(self) -> LargestRequest:
        """What the cache, and what the driver would serve."""
        request = self.request
        stream = request.stream if request else 0
        # A block above max_split_size_mb serves a request of its own size too.
        free = max(
            (
                gap.size
                for gap in self.held.gaps
                if not self.held.segments[gap.segment].small
                and self.held.segments[gap.segment].stream == stream
                and self.held.segments[gap.segment].pool_id == COMMON_POOL
            ),
            default=0,
        )
        if self.oom is not None:
            return LargestRequest(from_cache=free, after_release=self.oom.largest_request)
        capacity = self.rehearsal.capacity
        if capacity.source is CapacitySource.UNKNOWN:
            return LargestRequest(from_cache=free, after_release=None)
        reserved = sum(segment.size for segment in self.held.segments)
        kept = reserved - sum(self.held.whole_pages(gap) for gap in self.held.gaps)
        left = max(0, capacity.bytes - kept)
        page = self.config.large_segment_size if self.config.expandable_segments else LARGE_ROUNDING
        return LargestRequest(from_cache=free, after_release=max(free, left // page * page))

    # In words

    def _cause(self, kind: CauseKind) -> FragmentationCause:
        if self.is_state:
            remedies = of_a_state(kind.name, given_back_by_empty_cache(self.pools))
        else:
            remedies = remedies_for(kind.name, self.config, self.rehearsal.version)
        return FragmentationCause(
            kind=kind,
            bytes=self.account.bytes[kind],
            count=self.account.counts[kind],
            evidence=self._evidence(kind),
            remedies=remedies,
        )

    def _live_memory(self) -> FragmentationCause:
        oom = self.oom
        assert oom is not None
        packed = oom.answer(WhatIf.DEFRAGMENTED)
        assert packed is not None
        short = max(0, -packed.margin)
        alive = self.lives.alive(self.held.row)
        total = oom.capacity.bytes + short - oom.requested
        evidence = (
            f"{format_bytes(total)} are alive, and {format_bytes(oom.requested)} were asked for, of "
            f"{format_bytes(oom.capacity.bytes)} that there are: {format_bytes(short)} too much, however they lie"
        )
        if not oom.capacity.bytes:
            evidence = "the CUDA context takes all of the card, so nothing is left for the allocator"
        if others := self._other_devices():
            evidence += f"; {others}"
        return FragmentationCause(
            kind=CauseKind.LIVE_MEMORY,
            bytes=short,
            count=len(alive),
            evidence=evidence,
            remedies=remedies_for(
                CauseKind.LIVE_MEMORY.name,
                self.config,
                self.rehearsal.version,
                capacity=oom.capacity.bytes,
                largest=oom.largest_request,
                uneven=bool(self._other_devices()),
            ),
        )

    def _other_devices(self) -> str:
        """Other cards of the program that are far from full at the same moment."""
        mine = int(self.lives.block[self.lives.alive(self.held.row)].sum())
        found = []
        for index in np.unique(self.trace.device[self.trace.kind == EventKind.ALLOC]).tolist():
            if index == self.lives.device:
                continue
            lives = DeviceTimeline.of(self.trace, index).lives
            held = int(lives.block[lives.alive(self.held.row)].sum())
            if held < mine // 2:
                found.append(f"GPU {index} holds {format_bytes(held)}")
        return " and ".join(found)

    def _evidence(self, kind: CauseKind) -> str:
        account = self.account
        size, count = format_bytes(account.bytes[kind]), account.counts[kind]
        largest = format_bytes(account.largest[kind])
        request = self.request
        wanted = "" if request is None else format_bytes(request.size)
        verb = "failed" if request is not None and request.failed else "needed new memory"
        many = counted(count, "free range")
        if kind is CauseKind.ROUNDING:
            step = "the next power-of-two division" if not account.rounding.plain else f"{MIN_BLOCK} bytes"
            return f"{counted(count, 'live block')}, {size} larger than asked for: rounded up to {step}"
        if kind is CauseKind.UNSPLIT_SLACK:
            return f"{counted(count, 'live block')} with {size} behind what was asked for, at most {largest} each"
        if kind is CauseKind.PENDING_FREE:
            were, them = ("was", "it") if count == 1 else ("were", "them")
            freed = f"{counted(count, 'block')} of {size} {were} freed"
            return f"{freed}, but another stream that used {them} is not past {them}"
        if kind is CauseKind.OTHER_STREAM:
            assert request is not None
            fits = "would have served" if account.largest[kind] >= request.size else "is smaller than"
            return (
                f"{many} of {size} on other streams than stream {request.stream}; the largest, {largest}, {fits} the "
                f"{wanted} that {verb}"
            )
        if kind is CauseKind.OTHER_POOL:
            assert request is not None
            mine, other = ("small", "large") if request.small else ("large", "small")
            return (
                f"{many} of {size} are in the {other} pool; the {wanted} that {verb} are for the {mine} one"
            )
        if kind in (CauseKind.OVERSIZE_CACHED, CauseKind.MAX_SPLIT_EXPANDABLE):
            limit = format_bytes(self.config.max_split_size or 0)
            return (
                f"{many} of {size}, large enough for the {wanted} that {verb}; but blocks of {limit} and more serve "
                "only requests of about their size"
            )
        if kind in (CauseKind.LONG_LIVED_IN_HOLE, CauseKind.INTERLEAVED, CauseKind.BESIDE_LIVE):
            return f"{many} of {size} beside live blocks, the largest {largest}{self._main_pin(kind)}"
        if kind in (CauseKind.GROWING_SIZES, CauseKind.VARYING_SIZES, CauseKind.SMALLER_SEGMENTS):
            return f"{counted(count, 'free segment')} of {size}, the largest {largest}, too small for the {wanted}"
        if kind is CauseKind.PAGE_EDGES:
            return f"{many} of {size} on pages that hold live blocks too{self._main_pin(kind)}"
        return f"{many} of {size}, the largest {largest}"

    def _main_pin(self, kind: CauseKind) -> str:
        """What lies beside most of the free ranges of a cause."""
        pin = self.pins.main(self.account.ranges.get(kind, ()))
        if pin is None:
            return ""
        name = pin.group.tensor or pin.group.op or format_bytes(pin.group.block_bytes)
        times = f" ×{pin.group.count:,}" if pin.group.count > 1 else ""
        made = f" made in {pin.phase}" if pin.phase else ""
        return f"; the most, {format_bytes(pin.pinned)}, beside {name}{times}{made}"
