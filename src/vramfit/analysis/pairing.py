"""Which blocks of a recording are which of a prediction, and by which of them two moments differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property

import numpy as np

from vramfit.analysis._lifetimes import Flags, Ints
from vramfit.analysis.alignment import Alignment
from vramfit.analysis.reconciliation import Cause, Difference, StreamComparison, StreamDifference
from vramfit.analysis.requests import RequestLabel, Requests
from vramfit.trace import Category
from vramfit.trace.frame_categories import BY_FRAMES

WORKSPACE_BYTES = frozenset({8_519_680, 32 << 20})
"""What torch takes for cuBLAS: 2 x 4 MiB and 8 x 16 KiB, and 32 MiB on compute capability 9 and newer
(ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``)."""

_LIBRARY_CALLS = ("cublas", "CUDABlasWorkspace")

_HANDLES = 2
"""cuBLAS handles of a training program: its own thread's and that of autograd."""

_UNPAIRED = -1


class Pairing:
    """The blocks that two sequences of requests have in common.

    Attributes:
        recorded, predicted: the requests.
        of_recorded: for each block of the recording the block of the prediction that it is, or -1.
        of_predicted: the other way round.
        start_row: last row of the prediction before the stretch that the recording covers.
        stop_row: last row of that stretch.
        recorded_workspaces, predicted_workspaces: which blocks are workspaces of libraries.
    """

    def __init__(self, recorded: Requests, predicted: Requests, alignment: Alignment) -> None:
        self.recorded = recorded
        self.predicted = predicted
        self.alignment = alignment
        rows, start, stop = predicted.rows, alignment.start, alignment.stop
        self.start_row = predicted.settled(int(rows[start - 1])) if start else -1
        self.stop_row = int(rows[stop - 1]) if 0 < stop < len(rows) else predicted.lives.rows - 1
        self.of_recorded: Ints = np.full(len(recorded.lives.born), _UNPAIRED, dtype=np.int64)
        self.of_predicted: Ints = np.full(len(predicted.lives.born), _UNPAIRED, dtype=np.int64)
        self.predicted_workspaces: Flags = _known_workspaces(predicted)
        self._pair_requests()
        self._pair_start()
        self.recorded_workspaces: Flags = self._recorded_workspaces()

    def _pair_requests(self) -> None:
        one, two, first, second = self.recorded, self.predicted, self.alignment.first, self.alignment.second
        takes = one.takes[first]
        self._join(one.block[first[takes]], two.block[second[takes]])
        left, right = one.block[first[~takes]], two.block[second[~takes]]
        # A block that was there before the recording shows in it by its return alone.
        early = (one.lives.born[left] < 0) & (two.lives.born[right] <= self.start_row)
        early &= (self.of_recorded[left] == _UNPAIRED) & (self.of_predicted[right] == _UNPAIRED)
        self._join(left[early], right[early])

    def _pair_start(self) -> None:
        """Pair what is left of the blocks from before the recording by size; workspaces last.

        What a program's own objects need is certain, so where there are too few blocks of a size it is a workspace
        that is missing.
        """
        one, two = self.recorded.lives, self.predicted.lives
        waiting: dict[int, list[int]] = defaultdict(list)
        there = two.alive(self.start_row)
        there = there[self.of_predicted[there] == _UNPAIRED]
        there = there[np.argsort(~self.predicted_workspaces[there], kind="stable")]
        for block, size in zip(there.tolist(), two.size[there].tolist(), strict=True):
            waiting[size].append(block)
        for block in one.alive(-1)[self.of_recorded[one.alive(-1)] == _UNPAIRED].tolist():
            found = waiting.get(int(one.size[block]))
            if found:
                self._join(np.array([block]), np.array([found.pop()]))

    def _join(self, left: Ints, right: Ints) -> None:
        self.of_recorded[left] = right
        self.of_predicted[right] = left

    def _recorded_workspaces(self) -> Flags:
        """Blocks paired with a workspace; of the others, those named so, or kept and of such a size."""
        paired = self.of_recorded != _UNPAIRED
        found: Flags = np.zeros(len(paired), dtype=bool)
        found[paired] = self.predicted_workspaces[self.of_recorded[paired]]
        known = self.predicted.lives.size[self.predicted_workspaces].tolist()
        found |= _likely_workspaces(self.recorded, WORKSPACE_BYTES | set(known), ~paired, found)
        return found

    def recorded_row(self, row: int) -> int:
        """The event of the recording that is, or comes right before, an event of the prediction."""
        index = int(np.searchsorted(self.predicted.rows[self.alignment.second], row, side="right")) - 1
        if index < 0:
            return -1
        return self.recorded.settled(int(self.recorded.rows[self.alignment.first[index]]))

    def predicted_row(self, row: int) -> int:
        """The event of the prediction that is, or comes right before, an event of the recording."""
        index = int(np.searchsorted(self.recorded.rows[self.alignment.first], row, side="right")) - 1
        if index < 0:
            return self.start_row
        return self.predicted.settled(int(self.predicted.rows[self.alignment.second[index]]))

    # -- what differs ----------------------------------------------------------------------------------------

    def at(self, recorded_row: int, predicted_row: int) -> tuple[Difference, ...]:
        """The blocks by which two moments differ, largest first.

        The totals of those that are not ROUNDED sum to the difference in requested bytes.
        """
        here, there = self.recorded.lives.alive(recorded_row), self.predicted.lives.alive(predicted_row)
        # One element more than there are blocks: it is what -1 finds.
        is_here = np.zeros(len(self.of_recorded) + 1, dtype=bool)
        is_there = np.zeros(len(self.of_predicted) + 1, dtype=bool)
        is_here[here], is_there[there] = True, True
        partner = self.of_recorded[here]
        common = is_there[partner]
        only_there, only_here = self._without_alike(
            there[~is_here[self.of_predicted[there]]].tolist(), here[~common].tolist()
        )
        found: Counter[tuple[Cause, RequestLabel, bool, bool, int]] = Counter()
        for block in only_there:
            cause = Cause.EXTRA if self.of_predicted[block] == _UNPAIRED else Cause.LONGER
            key = (self.predicted.label(block), False, bool(self.predicted_workspaces[block]))
            found[cause, *key, int(self.predicted.lives.size[block])] += 1
        for block in only_here:
            cause = Cause.MISSING if self.of_recorded[block] == _UNPAIRED else Cause.SHORTER
            label, near = self.label_of_recorded(block)
            workspace = bool(self.recorded_workspaces[block])
            found[cause, label, near, workspace, int(self.recorded.lives.size[block])] += 1
        differences = [
            Difference(
                cause=cause,
                label=label,
                is_near=near,
                is_workspace=workspace,
                size=size,
                count=count,
                total=size * count * (1 if cause in (Cause.EXTRA, Cause.LONGER) else -1),
            )
            for (cause, label, near, workspace, size), count in found.items()
        ]
        differences += self._rounded(here[common], partner[common])
        return tuple(sorted(differences, key=lambda one: -abs(one.total)))

    def _without_alike(self, predicted: list[int], recorded: list[int]) -> tuple[list[int], list[int]]:
        """Leave out, pair by pair, blocks of the same size on both sides, those of the same line and op first."""
        one, other = self._key_of_predicted, self._key_of_recorded
        predicted, recorded = _unlike(predicted, recorded, one, other)
        return _unlike(predicted, recorded, lambda block: one(block)[:2], lambda block: other(block)[:2])

    def _key_of_predicted(self, block: int) -> tuple[Hashable, ...]:
        label = self.predicted.label(block)
        flag = bool(self.predicted_workspaces[block])
        return (flag, int(self.predicted.lives.size[block]), label.op, label.line)

    def _key_of_recorded(self, block: int) -> tuple[Hashable, ...]:
        label, _ = self.label_of_recorded(block)
        return (
            bool(self.recorded_workspaces[block]),
            int(self.recorded.lives.size[block]),
            label.op,
            label.line,
        )

    def _rounded(self, here: Ints, there: Ints) -> list[Difference]:
        """Blocks that both hold, where they are not of the same size."""
        excess = self.predicted.lives.block[there] - self.recorded.lives.block[here]
        counts: Counter[tuple[RequestLabel, bool, int]] = Counter()
        totals: Counter[tuple[RequestLabel, bool, int]] = Counter()
        for block, amount in zip(there[excess != 0].tolist(), excess[excess != 0].tolist(), strict=True):
            workspace = bool(self.predicted_workspaces[block])
            key = (self.predicted.label(block), workspace, int(self.predicted.lives.size[block]))
            counts[key] += 1
            totals[key] += amount
        return [
            Difference(
                cause=Cause.ROUNDED,
                label=label,
                is_near=False,
                is_workspace=workspace,
                size=size,
                count=counts[label, workspace, size],
                total=total,
            )
            for (label, workspace, size), total in totals.items()
            if total
        ]

    def label_of_recorded(self, block: int) -> tuple[RequestLabel, bool]:
        """Who asked for a block of the recording, by its counterpart, its own stack, or the request before it."""
        partner = int(self.of_recorded[block])
        if partner != _UNPAIRED:
            return self.predicted.label(partner), False
        own = self.recorded.label(block)
        if own.line is not None or own.op:
            return own, False
        row = int(self.recorded.lives.born[block])
        if row < 0:
            return own, False
        rows, second = self._common_requests
        before = int(np.searchsorted(rows, row)) - 1
        if before < 0:
            return own, True
        near = self.predicted.label(int(self.predicted.block[second[before]]))
        return near._replace(category=Category.OTHER, tensor=""), True

    @cached_property
    def _common_requests(self) -> tuple[Ints, Ints]:
        """Rows of the recording at which both ask for a block, and the requests of the prediction that these are."""
        takes = self.recorded.takes[self.alignment.first]
        return self.recorded.rows[self.alignment.first[takes]], self.alignment.second[takes]

    def streams(self) -> StreamComparison:
        """How the two sequences of requests differ, at whatever moment."""
        one, two, alignment = self.recorded, self.predicted, self.alignment
        inside = np.arange(alignment.start, alignment.stop)
        extra = np.setdiff1d(inside, alignment.second, assume_unique=True)
        missing = np.setdiff1d(np.arange(len(one)), alignment.first, assume_unique=True)
        found: Counter[tuple[Cause, RequestLabel, bool, int]] = Counter()
        for index in extra[two.takes[extra]].tolist():
            block = int(two.block[index])
            found[Cause.EXTRA, two.label(block), False, int(two.lives.size[block])] += 1
        for index in missing[one.takes[missing]].tolist():
            block = int(one.block[index])
            found[Cause.MISSING, *self.label_of_recorded(block), int(one.lives.size[block])] += 1
        differing = [
            StreamDifference(cause=cause, label=label, is_near=near, size=size, count=count)
            for (cause, label, near, size), count in found.items()
        ]
        return StreamComparison(
            recorded=int(one.takes.sum()),
            predicted=int(two.takes[inside].sum()),
            matched=int(one.takes[alignment.first].sum()),
            before=int(two.takes[: alignment.start].sum()),
            after=int(two.takes[alignment.stop :].sum()),
            moved_frees=self._moved(),
            differing=tuple(sorted(differing, key=lambda each: -each.size * each.count)),
        )

    def _moved(self) -> int:
        """How many blocks that both have are given back after another request in the prediction.

        The order of returns between the same two requests does not count: in which order a program lets go of several
        objects at once is chance, and makes no difference to the allocator.
        """
        one, two = self.recorded, self.predicted
        rows, second = self._common_requests
        here = np.flatnonzero(self.of_recorded != _UNPAIRED)
        freed_here = one.lives.freed[here]
        freed_there = two.lives.freed[self.of_recorded[here]]
        before_here = np.searchsorted(rows, freed_here)
        before_there = np.searchsorted(two.rows[second], freed_there)
        kept_here = freed_here >= one.lives.rows
        kept_there = (freed_there >= two.lives.rows) | (freed_there > self.stop_row)
        moved = np.where(kept_here | kept_there, kept_here != kept_there, before_here != before_there)
        return int(moved.sum())


def _unlike(
    mine: Iterable[int],
    theirs: Iterable[int],
    my_key: Callable[[int], Hashable],
    their_key: Callable[[int], Hashable],
) -> tuple[list[int], list[int]]:
    """What is left of two collections when those with the same key are taken off pair by pair."""
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    for block in theirs:
        waiting[their_key(block)].append(block)
    left = []
    for block in mine:
        found = waiting.get(my_key(block))
        if found:
            found.pop()
        else:
            left.append(block)
    return left, [block for blocks in waiting.values() for block in blocks]


def _known_workspaces(requests: Requests) -> Flags:
    """The blocks that the trace categorises as workspaces; without categories, those that look like workspaces."""
    categories = requests.lives.category
    by_frames = requests.trace.meta.get("categories") == BY_FRAMES
    if requests.trace.category.any() and not by_frames:
        flags: Flags = categories == Category.WORKSPACES
        return flags
    every, none = np.ones(len(categories), dtype=bool), np.zeros(len(categories), dtype=bool)
    return _likely_workspaces(requests, WORKSPACE_BYTES, every, none)


def _likely_workspaces(requests: Requests, sizes: frozenset[int], asked: Flags, known: Flags) -> Flags:
    """Which of the blocks ``asked`` about are workspaces, beside those ``known``.

    Those that a library asked for by name; and of blocks that are of a workspace's size and kept to the end the first
    ones, since a workspace is taken at the first use: as many as make one for the program's thread and one for that
    of autograd. Activations may be of the same size.
    """
    lives = requests.lives
    found: Flags = asked & _named_workspaces(requests)
    kept = asked & ~found & (lives.freed == lives.rows)
    for size in sizes:
        left = _HANDLES - int(((known | found) & (lives.size == size)).sum())
        of_size = np.flatnonzero(kept & (lives.size == size))
        found[of_size[np.argsort(lives.born[of_size], kind="stable")][: max(0, left)]] = True
    return found


def _named_workspaces(requests: Requests) -> Flags:
    """Blocks whose stack names the library; torch can record functions in C++ too."""
    trace, born = requests.trace, requests.lives.born
    named = [
        index
        for index, stack in enumerate(trace.stacks)
        if any(call in trace.frames[frame].name for frame in stack[:12] for call in _LIBRARY_CALLS)
    ]
    found: Flags = np.zeros(len(born), dtype=bool)
    if named and len(trace):
        found[born >= 0] = np.isin(trace.stack[born[born >= 0]], np.array(named))
    return found
