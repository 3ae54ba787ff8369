"""Which live blocks keep which segments from being reused or returned to the driver, and how that came about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Ints, Lifetimes, born_column
from vramfit.analysis.groups import Grouping, TensorGroup, entry, stack_frames
from vramfit.analysis.occupancy import Gap, HeldSegment, Occupancy, tenants
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.trace.frames import user_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """One block, and who made it.

    Attributes:
        address, size, block: its address, bytes requested, and bytes of the block.
        tensor, op, module, phase: as in the trace, empty where it does not say.
        line: the user's line that made it.
        born: event that made it; -1 from before the trace.
        freed: event at which its free is asked for; None if never within the trace.
        age_us: its age at the moment, 0 where the trace has no times.
        in_hole: other blocks lay at its place before, within the same segment.
    """

    address: int
    size: int
    block: int
    tensor: str
    op: str
    module: str
    phase: str
    category: Category
    line: Frame | None
    born: int
    freed: int | None
    age_us: int
    in_hole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedSegment:
    """A segment with both live blocks and free memory in it, and its history.

    Attributes:
        free: free bytes in it.
        largest_gap: the largest free range.
        taken_for: the block for which it was taken; None if that was before the trace.
        pins: the live blocks, at most `PINS` of them, by age.
        pins_omitted: live blocks that are left off.
        gone: blocks that have lain in it and were freed, of the bytes that are free now or not.
        gone_bytes: their bytes altogether.
        last_freed: event at which the last of them was freed; -1 if none.
        last_freed_phase: the phase then.
    """

    segment: HeldSegment
    free: int
    largest_gap: int
    taken_for: Holder | None
    pins: tuple[Holder, ...]
    pins_omitted: int
    gone: int
    gone_bytes: int
    last_freed: int
    last_freed_phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PinGroup:
    """Like blocks that lie beside free memory.

    Attributes:
        phase: the phase in which the first of them was made.
        born: event that made the first of them; -1 from before the trace.
        in_holes: number of blocks beside free memory that lie where other blocks were before.
        pinned: free bytes beside them; a gap between two blocks counts half for each.
        segments: number of segments with such blocks.
        freeing_releases: bytes that could be given back to the driver if all of them were gone: of classic segments
            in which nothing else lies.
        outlives: events after the moment, at most to the end of the trace, for which the blocks live on.
    """

    group: TensorGroup
    phase: str
    born: int
    in_holes: int
    pinned: int
    segments: int
    freeing_releases: int
    outlives: int


PINS = 8


class Pins:
    """The pins of one moment.

    The rest of the newest segment counts for none of its blocks: the allocator took more than was asked for, and the
    next request is served from it.

    Attributes:
        held: segments, blocks and gaps.
        in_hole: for each pinning block (index into the lifetimes) whether others lay at its place before.
    """

    def __init__(self, trace: MemoryTrace, lives: Lifetimes, held: Occupancy, grown: int) -> None:
        """Look at every segment with gaps that its blocks pin; ``grown`` is the row of the newest segment, or -1."""
        self.trace, self.lives, self.held = trace, lives, held
        self._order: Ints = np.argsort(lives.address, kind="stable")
        self._free: dict[int, int] = {}
        self._pinned_in: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.in_hole: dict[int, bool] = {}
        self._tenants: dict[int, Ints] = {}
        for gap in held.gaps:
            if held.is_whole(gap):
                continue
            self._free[gap.segment] = self._free.get(gap.segment, 0) + gap.size
            self._largest[gap.segment] = max(self._largest.get(gap.segment, 0), gap.size)
            if held.is_rest(gap, grown):
                continue
            self._pinned_in[gap.segment] = self._pinned_in.get(gap.segment, 0) + gap.size
            _share(gap, gap.size, self.pinned)
        for index in self._pinned_in:
            self._look_at(index)

    def _look_at(self, index: int) -> None:
        lives = self.lives
        found = tenants(lives, self.held.segments[index], self.held.row, self._order)
        self._tenants[index] = found
        begin = lives.address[found].astype(np.int64)
        end = begin + lives.block[found]
        gone = lives.completed[found]
        for block in self.held.blocks[index]:
            if block in self.pinned:
                address, born = int(lives.address[block]), int(lives.born[block])
                earlier = (begin < address + int(lives.block[block])) & (end > address) & (gone <= born)
                self.in_hole[block] = bool(earlier.any())

    def holder(self, block: int) -> Holder:
        """A block with all that the trace says of it."""
        trace, lives, row = self.trace, self.lives, self.held.row
        born = int(lives.born[block])
        freed = int(lives.freed[block])
        age = int(trace.time_us[row] - trace.time_us[born]) if born >= 0 and row >= 0 else 0

        def of(table: Sequence[str], column: str) -> str:
            return entry(table, int(getattr(trace, column)[born])) if born >= 0 else ""

        return Holder(
            address=int(lives.address[block]),
            size=int(lives.size[block]),
            block=int(lives.block[block]),
            tensor=of(trace.tensors, "tensor"),
            op=of(trace.ops, "op"),
            module=of(trace.modules, "module"),
            phase=of(trace.phases, "phase"),
            category=Category(int(lives.category[block])),
            line=user_frame(stack_frames(trace, int(lives.stack[block]))),
            born=born,
            freed=None if freed >= lives.rows else freed,
            age_us=max(0, age),
            in_hole=self.in_hole.get(block, False),
        )

    def worst(self, limit: int) -> tuple[PinnedSegment, ...]:
        """The segments with the most pinned free memory, each with its history."""
        order = sorted(self._pinned_in, key=lambda index: (-self._pinned_in[index], index))
        return tuple(self._segment(index) for index in order[:limit])

    def _segment(self, index: int) -> PinnedSegment:
        lives, row, trace = self.lives, self.held.row, self.trace
        segment = self.held.segments[index]
        inside = sorted(self.held.blocks[index], key=lambda block: int(lives.born[block]))
        past = self._tenants[index]
        gone = past[lives.completed[past] <= row]
        last = int(lives.completed[gone].max(initial=-1))
        return PinnedSegment(
            segment=segment,
            free=self._free[index],
            largest_gap=self._largest[index],
            taken_for=self._first_tenant(segment, past),
            pins=tuple(self.holder(block) for block in inside[:PINS]),
            pins_omitted=max(0, len(inside) - PINS),
            gone=len(gone),
            gone_bytes=int(lives.block[gone].sum()),
            last_freed=last,
            last_freed_phase=entry(trace.phases, int(trace.phase[last])) if last >= 0 else "",
        )

    def _first_tenant(self, segment: HeldSegment, past: Ints) -> Holder | None:
        if segment.born < 0:
            return None
        born = self.lives.born[past]
        since = past[born > segment.born]
        if not len(since):
            return None
        return self.holder(int(since[np.argmin(self.lives.born[since])]))

    def groups(self, limit: int) -> tuple[PinGroup, ...]:
        """The pinning blocks by what they are, those beside the most free memory first."""
        # All blocks of those segments, also those that lie beside no gap: they hold the segment as well.
        blocks = {block for index in self._pinned_in for block in self.held.blocks[index]}
        return tuple(self._groups(blocks, self.pinned)[:limit])

    def main(self, ranges: Iterable[tuple[Gap, int]]) -> PinGroup | None:
        """The like blocks beside most of some free ranges, each a gap and how much of it; None if beside none.

        What is pinned are bytes of these ranges alone, and the blocks are those beside them.
        """
        pinned: dict[int, int] = {}
        for gap, size in ranges:
            _share(gap, size, pinned)
        return next(iter(self._groups(pinned, pinned)), None)

    def _groups(self, chosen: Collection[int], pinned: dict[int, int]) -> list[PinGroup]:
        """Some blocks by what they are, with the free bytes beside each, most bytes first."""
        lives = self.lives
        blocks = np.array(sorted(chosen), dtype=np.int64)
        if not len(blocks):
            return []
        grouping = Grouping.of(self.trace, lives, blocks)
        phases = born_column(self.trace.phase, lives.born[blocks])
        home = {block: index for index in self._pinned_in for block in self.held.blocks[index]}
        found = []
        for group, key in grouping.with_members():
            alike = grouping.alike(key)
            members = blocks[alike]
            total = sum(pinned.get(block, 0) for block in members.tolist())
            if not total:
                continue
            first = int(np.argmin(lives.born[members]))
            inside = set(members.tolist())
            segments = {home[block] for block in inside}
            alone = [
                index
                for index in segments
                if not self.held.segments[index].expandable and inside.issuperset(self.held.blocks[index])
            ]
            found.append(
                PinGroup(
                    group=group,
                    phase=entry(self.trace.phases, int(phases[alike][first])),
                    born=int(lives.born[members[first]]),
                    in_holes=sum(self.in_hole.get(block, False) for block in inside),
                    pinned=total,
                    segments=len(segments),
                    freeing_releases=sum(self.held.segments[index].size for index in alone),
                    outlives=int((lives.freed[members] - 1 - self.held.row).max()),
                )
            )
        found.sort(key=lambda pin: (-pin.pinned, pin.born))
        return found


def _share(gap: Gap, size: int, pinned: dict[int, int]) -> None:
    """Add ``size`` bytes of a gap to the blocks beside it, half to each of two."""
    beside = [block for block in (gap.before, gap.after) if block >= 0]
    for place, block in enumerate(beside):
        share = size // len(beside) + (size % len(beside) if place == 0 else 0)
        pinned[block] = pinned.get(block, 0) + share
