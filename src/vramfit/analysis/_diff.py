"""Compares two runs at their peaks: what grew, what is new, what went away; aligned by stack and module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath

from vramfit.analysis._states import Holding, PeakState, state_from_trace
from vramfit.errors import UsageError
from vramfit.trace import Category, Frame, MemoryTrace


class Change(Enum):
    """What became of some blocks."""

    NEW = "new"
    GREW = "grew"
    SAME = "same"
    SHRANK = "shrank"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A figure before and after, in bytes."""

    before: int
    after: int

    @property
    def difference(self) -> int:
        """Bytes more, negative for less."""
        return self.after - self.before

    @property
    def share(self) -> float | None:
        """The difference as a share of the figure before; None where that is 0."""
        return self.difference / self.before if self.before else None


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldingChange:
    """Blocks of one stack and module, before and after.

    Attributes:
        category, op, module: those of the later run; those of the earlier one for blocks that are gone.
        tensor_before, tensor_after: the largest of them; empty where there are none.
        line_before, line_after: the user's line, which may have moved; None where there are none or it is unknown.
        count_before, count_after: number of blocks.
        size: their bytes.
        each_before, each_after: bytes of one of them; None where there are none, they differ in size, or the source
            does not say.
    """

    category: Category
    op: str
    module: str
    tensor_before: str
    tensor_after: str
    line_before: Frame | None
    line_after: Frame | None
    count_before: int
    count_after: int
    size: Pair
    each_before: int | None = None
    each_after: int | None = None

    @property
    def change(self) -> Change:
        """What became of them."""
        if not self.size.before:
            return Change.NEW
        if not self.size.after:
            return Change.GONE
        if self.size.difference:
            return Change.GREW if self.size.difference > 0 else Change.SHRANK
        return Change.SAME


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDiff:
    """How one device of a run differs from that of another, at the peak of allocated bytes of each.

    Attributes:
        before, after: the two.
        allocated, reserved, outside: peaks, and memory outside torch's allocator; None where one does not say.
        categories: bytes by category at the peaks; empty unless both tell.
        modules: bytes by folded module path, largest difference first; only those that differ.
        phases: highest allocated bytes by part of the iteration; only parts of either, those that differ.
        changes: the blocks, largest difference first; those that did not change are left out. Empty unless both tell.
        omitted: bytes that the runs hold beyond what they list.
    """

    before: PeakState
    after: PeakState
    allocated: Pair | None
    reserved: Pair | None
    outside: Pair | None
    categories: Mapping[Category, Pair]
    modules: Mapping[str, Pair]
    phases: Mapping[str, Pair]
    changes: tuple[HoldingChange, ...]
    omitted: Pair

    @property
    def detailed(self) -> bool:
        """Whether both sources list what was alive."""
        return self.before.detailed and self.after.detailed

    @property
    def same(self) -> bool:
        """Whether nothing differs in what both sources contain."""
        pairs = (self.allocated, self.reserved, self.outside, *self.categories.values())
        return not (self.changes or self.modules or any(pair and pair.difference for pair in pairs))


def diff(
    before: MemoryTrace | PeakState,
    after: MemoryTrace | PeakState,
    device: int = 0,
    *,
    after_device: int | None = None,
) -> TraceDiff:
    """Compare two runs.

    Blocks are the same where category, operator, module (layer numbers apart) and all lines of the stack are. Of the
    rest those where only line numbers moved, then those where the operator changed. File names count without their
    folders, so that runs of two checkouts compare. Where a source tells only the innermost lines (a JSON report), or
    no categories (a torch snapshot), the other's further knowledge is left aside.

    Args:
        before, after: traces, or what `states` made of files.
        device: index of the device, for traces.
        after_device: its index in the second, where that is another.
    """
    if isinstance(before, MemoryTrace):
        before = state_from_trace(before, device, name="before")
    if isinstance(after, MemoryTrace):
        after = state_from_trace(after, device if after_device is None else after_device, name="after")
    detailed = before.detailed and after.detailed
    categories = {
        kind: Pair(before=before.categories.get(kind, 0), after=after.categories.get(kind, 0))
        for kind in (*list(Category)[1:], Category.OTHER)
        if before.categories and after.categories and _both_tell(before, after, "category")
    }
    return TraceDiff(
        before=before,
        after=after,
        allocated=_pair(before.allocated, after.allocated),
        reserved=_pair(before.reserved, after.reserved),
        outside=_pair(before.outside, after.outside),
        categories=categories,
        modules=_differing(before.modules, after.modules) if _both_tell(before, after, "module") else {},
        phases=_differing(before.phases, after.phases) if before.phases and after.phases else {},
        changes=_changes(before, after) if detailed else (),
        omitted=Pair(before=before.omitted, after=after.omitted),
    )


def diff_states(
    before: Sequence[PeakState], after: Sequence[PeakState], device: int | None = None
) -> tuple[TraceDiff, ...]:
    """Compare two runs device by device.

    Args:
        before, after: results of `states`. Where each has a single device, these are compared, whatever
            their indices.
        device: only the device of this index; None means all that both have.

    Raises:
        UsageError: they have no device in common, or not the one that is asked for.
    """
    ours, theirs = ({one.device: one for one in side} for side in (before, after))
    if device is None and len(ours) == len(theirs) == 1:
        return (diff(before[0], after[0]),)
    shared = sorted(ours.keys() & theirs.keys()) if device is None else [device]
    if not shared:
        names = " and ".join(side[0].name if side else "an empty run" for side in (before, after))
        held = " and ".join(_listed(known) for known in (ours, theirs))
        raise UsageError(f"{names} have no device in common", f"They have {held}")
    for side, known in ((before, ours), (after, theirs)):
        if device is not None and device not in known:
            name = side[0].name if side else "an empty run"
            raise UsageError(f"{name} has no device {device}", f"It has {_listed(known)}")
    return tuple(diff(ours[index], theirs[index]) for index in shared)


def _listed(devices: Iterable[int]) -> str:
    """``device 0``, ``devices 0, 1``."""
    known = sorted(devices)
    held = ", ".join(map(str, known))
    return (f"device {held}" if len(known) == 1 else f"devices {held}") if known else "no device"


def _pair(before: int | None, after: int | None) -> Pair | None:
    return None if before is None or after is None else Pair(before=before, after=after)


def _differing(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Pair]:
    """The figures that differ, largest difference first."""
    names = dict.fromkeys((*before, *after))
    pairs = {name: Pair(before=before.get(name, 0), after=after.get(name, 0)) for name in names}
    changed = [(name, pair) for name, pair in pairs.items() if pair.difference]
    return dict(sorted(changed, key=lambda one: (-abs(one[1].difference), one[0])))


_Key = Callable[[Holding], Hashable]
_TOLD = ("category", "op", "module", "tensor", "stack")


def _tells(state: PeakState, name: str) -> bool:
    """Whether a source knows this of any of its blocks."""
    return any(getattr(one, name) for one in state.holdings)


def _both_tell(before: PeakState, after: PeakState, name: str) -> bool:
    """Whether both sources know this alike: what stacks tell of categories is less than what a virtual run knows."""
    if name == "category" and before.by_frames != after.by_frames:
        return False
    return _tells(before, name) and _tells(after, name)


def _changes(before: PeakState, after: PeakState) -> tuple[HoldingChange, ...]:
    """The holdings of both, paired from the most to the least that they have in common."""
    deep = before.deep and after.deep
    # Recordings of a card know no categories, operators, modules and tensors, and some no stacks.
    known = {name for name in _TOLD if _both_tell(before, after, name)}

    def stack(one: Holding) -> tuple[Frame, ...]:
        if "stack" not in known:
            return ()
        return one.stack if deep else one.stack[: 1 + _names_library(one)]

    def words(one: Holding, *names: str) -> tuple[object, ...]:
        return tuple(getattr(one, name) for name in names if name in known)

    passes: tuple[_Key, ...] = (
        lambda one: (*words(one, "category", "op", "module"), *map(_place, stack(one))),
        lambda one: (*words(one, "category", "op", "module", "tensor"), *map(_function, stack(one))),
        lambda one: (*words(one, "category", "op", "module"), *map(_function, stack(one))),
        lambda one: (*words(one, "category", "module"), *map(_function, stack(one))),
    )
    left, right = list(before.holdings), list(after.holdings)
    found = []
    for key in passes:
        pairs, left, right = _matched(left, right, key)
        found += [_change(*pair) for pair in pairs]
    # What nothing of the other is like: joined as in the first pass, so that one line of code is one entry.
    found += [_change(alike, []) for alike in _by_key(left, passes[0]).values()]
    found += [_change([], alike) for alike in _by_key(right, passes[0]).values()]
    changed = [one for one in found if one.change is not Change.SAME]
    return tuple(sorted(changed, key=_by_difference))


def _by_difference(one: HoldingChange) -> tuple[int, str, str, str]:
    return (-abs(one.size.difference), one.op, one.module, str(one.line_after or one.line_before))


def _names_library(one: Holding) -> bool:
    """Whether the first frame of the stack is a library's, called by the user's line."""
    return len(one.stack) > 1 and one.stack[0] != one.line


def _place(frame: Frame) -> tuple[str, str, int]:
    return (*_function(frame), frame.line)


def _function(frame: Frame) -> tuple[str, str]:
    """A frame wherever it stands in its file."""
    return (PurePosixPath(frame.filename.replace("\\", "/")).name, frame.name)


def _matched(
    left: Sequence[Holding], right: Sequence[Holding], key: _Key
) -> tuple[list[tuple[list[Holding], list[Holding]]], list[Holding], list[Holding]]:
    """Those that have a key in common with the other side, together; and what is left of each side."""
    ours, theirs = _by_key(left, key), _by_key(right, key)
    pairs = [(alike, theirs[shared]) for shared, alike in ours.items() if shared in theirs]
    return (
        pairs,
        [one for shared, alike in ours.items() if shared not in theirs for one in alike],
        [one for shared, alike in theirs.items() if shared not in ours for one in alike],
    )


def _by_key(holdings: Iterable[Holding], key: _Key) -> dict[Hashable, list[Holding]]:
    found: dict[Hashable, list[Holding]] = {}
    for one in holdings:
        found.setdefault(key(one), []).append(one)
    return found


def _change(before: Sequence[Holding], after: Sequence[Holding]) -> HoldingChange:
    """One entry for all of these; their largest tensor speaks for them."""
    first = max(before, key=lambda one: one.total_bytes, default=None)
    last = max(after, key=lambda one: one.total_bytes, default=None)
    known = last or first
    assert known is not None
    return HoldingChange(
        category=known.category or (first.category if first is not None else Category.OTHER),
        op=known.op,
        module=known.module,
        tensor_before=first.tensor if first is not None else "",
        tensor_after=last.tensor if last is not None else "",
        line_before=first.line if first is not None else None,
        line_after=last.line if last is not None else None,
        count_before=sum(one.count for one in before),
        count_after=sum(one.count for one in after),
        size=Pair(before=sum(one.total_bytes for one in before), after=sum(one.total_bytes for one in after)),
        each_before=_each(before),
        each_after=_each(after),
    )


def _each(alike: Sequence[Holding]) -> int | None:
    """What one block takes where all take the same."""
    sizes = {one.block_bytes for one in alike}
    return (sizes.pop() or None) if len(sizes) == 1 else None
