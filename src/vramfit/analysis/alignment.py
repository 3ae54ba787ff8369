"""Aligns two long sequences that are nearly equal: which elements of one are which of the other.

Sequences of memory requests are long (100,000 and more), repeat themselves (every layer, every step) and differ in few
places. So equal stretches are found by hashes of prefixes, whatever their length, in one search; only where they end is
the smallest number of edits looked for (Myers, "An O(ND) Difference Algorithm and Its Variations", 1986; all diagonals
at once); and where that takes too many, the nearest stretch that both have in common is where it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Run = tuple[int, int, int]
"""A stretch that both have: where it begins in the first and in the second, and its length."""

_MOST_EDITS = 256
"""Edits that are looked for before an equal stretch further on is looked up instead."""
_CONFIDENT = 128
"""An equal stretch of so many elements ends a search for edits: going on from it cannot be far wrong."""
_WINDOW = 512
"""Without such a stretch, the search covers this many elements at a time and keeps three quarters of them."""
_WORTH = 64
"""Where even the most edits do not get so far, the two have nothing to do with each other here."""
_GRAMS = (256, 64, 16, 4)
"""Lengths of the stretches by which two places are recognised as the same, tried in this order."""
_NEAR = 1 << 14
_MOST_PAIRS = 1 << 20
"""Pairs of equal stretches that are looked at to find where the first begins in the second, the rarest first."""
_SAME_PLACE = 16
"""Places so near one another count as one: elements that are missing or extra on the way move them."""
_AS_GOOD = 0.998
"""Share of the best at which another place counts as equally good. One layer of many makes more than that."""
_CANDIDATES = ((0.995, 3), (0.5, 6), (0.1, 8))
"""Places are tried that have so large a share of the most votes, until there are so many of them."""
_UNREACHED = -(1 << 40)


class Ends(Enum):
    """Which ends of the second sequence may stand out over the first without counting as a difference."""

    NONE = "none"
    TAIL = "tail"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alignment:
    """Which elements of two sequences are the same.

    Attributes:
        first, second: indices of the elements that are, ascending, one array for each sequence.
        start, stop: the stretch of the second sequence that the first one covers.
    """

    first: Ints
    second: Ints
    start: int
    stop: int


def align(
    first: Ints, second: Ints, *, free: Ends = Ends.NONE, cost_of_start: Ints | None = None
) -> Alignment:
    """Align ``first`` with ``second``; only equal elements are ever aligned.

    Args:
        second: the other, of which the first may be a part.
        free: ends of the second that may stand out.
        cost_of_start: for each index of the second, how unlikely it is that the first begins there: this decides
            between places that resemble the first equally well, such as the steps of a training loop. Of equal ones
            the last is taken.
    """
    matcher = _Matcher(first, second)
    if free is not Ends.BOTH:
        return _alignment(first, second, matcher.runs(to_end=free is Ends.NONE), free)
    cost = np.zeros(len(second), dtype=np.int64) if cost_of_start is None else cost_of_start
    found: list[Alignment] = []
    for anchor in _anchors(matcher, cost):
        found.append(_through(anchor, first, second))
        if len(found[-1].first) == len(first):
            return found[-1]
    if not found:
        return Alignment(first=_NO_INTS, second=_NO_INTS, start=0, stop=len(second))
    most = max(len(one.first) for one in found)
    good = [one for one in found if len(one.first) >= _AS_GOOD * most]
    return min(good, key=lambda one: (int(cost[one.start]), -one.start))


def _through(anchor: tuple[int, int], first: Ints, second: Ints) -> Alignment:
    """The alignment that goes through a place of each, to both ends of the first."""
    at, there = anchor
    before = _Matcher(first[:at][::-1], second[:there][::-1]).runs(to_end=False)
    after = _Matcher(first[at:], second[there:]).runs(to_end=False)
    runs = [(at - i - length, there - j - length, length) for i, j, length in reversed(before)]
    runs += [(at + i, there + j, length) for i, j, length in after]
    return _alignment(first, second, runs, Ends.BOTH)


_NO_INTS: Ints = np.zeros(0, dtype=np.int64)


def _alignment(first: Ints, second: Ints, runs: list[Run], free: Ends) -> Alignment:
    lengths = np.array([length for _, _, length in runs], dtype=np.int64)
    steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    left = np.repeat(np.array([i for i, _, _ in runs], dtype=np.int64), lengths) + steps
    right = np.repeat(np.array([j for _, j, _ in runs], dtype=np.int64), lengths) + steps
    same = first[left] == second[right]  # hashes may collide, elements do not
    left, right = _moved_on(left[same], first), right[same]
    right = _moved_on(right, second)
    start, stop = 0, len(second)
    if len(left):
        # What stands out is as much as the first has left over there, since that may be the same thing otherwise.
        if free is Ends.BOTH:
            start = max(0, int(right[0]) - int(left[0]))
        if free is not Ends.NONE:
            stop = min(len(second), int(right[-1]) + len(first) - int(left[-1]))
    return Alignment(first=left, second=right, start=start, stop=stop)


def _moved_on(aligned: Ints, sequence: Ints) -> Ints:
    """Move unaligned elements to the end of a stretch of equal elements, where it is unknown which of them it is.

    The choice does not matter, but it should be the same in every layer of a model.
    """
    index = np.full(len(sequence), -1, dtype=np.int64)
    index[aligned] = np.arange(len(aligned))
    inside = slice(int(aligned[0]), int(aligned[-1])) if len(aligned) else slice(0, 0)
    left_over = np.flatnonzero(index[inside] < 0) + inside.start
    where = index.tolist()
    last = len(sequence) - 1
    for place in left_over[::-1].tolist():
        while place < last and where[place + 1] >= 0 and sequence[place] == sequence[place + 1]:
            where[place], where[place + 1] = where[place + 1], -1
            place += 1
    moved = np.array(where, dtype=np.int64)
    return np.flatnonzero(moved >= 0)


class _Matcher:
    """Two sequences, with prefix hashes that show how far they are equal from any two places."""

    def __init__(self, first: Ints, second: Ints) -> None:
        self.first = first
        self.second = second
        both = np.concatenate([first, second])
        found, inverse = np.unique(both, return_inverse=True)
        random = np.random.default_rng(len(found))
        values = random.integers(0, 1 << 64, len(found), dtype=np.uint64)[inverse.reshape(-1)]
        size = max(len(first), len(second)) + 1
        base = np.uint64(0x9E3779B97F4A7C15)
        self.powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(size, base)]), dtype=np.uint64)
        self._size = size
        self._sums = tuple(
            np.concatenate([[np.uint64(0)], np.cumsum(part * self.powers[: len(part)], dtype=np.uint64)])
            for part in (values[: len(first)], values[len(first) :])
        )

    def grams(self, length: int) -> tuple[Hashes, Hashes]:
        """Hashes of all stretches of a length, in both sequences."""
        return tuple(  # type: ignore[return-value]
            (sums[length:] - sums[:-length]) * self.powers[self._size - np.arange(len(sums) - length)]
            if len(sums) > length
            else np.zeros(0, dtype=np.uint64)
            for sums in self._sums
        )

    def equal_from(self, left: Ints, right: Ints) -> Ints:
        """How many elements are equal from each pair of places on."""
        lengths = np.zeros(len(left), dtype=np.int64)
        inside = np.flatnonzero((left < len(self.first)) & (right < len(self.second)))
        begun = inside[self.first[left[inside]] == self.second[right[inside]]]
        if not len(begun):
            return lengths
        left, right = left[begun], right[begun]
        most = np.minimum(len(self.first) - left, len(self.second) - right)
        one, two = self._sums
        scale_one, scale_two = self.powers[self._size - left], self.powers[self._size - right]
        from_one, from_two = one[left], two[right]
        known = np.zeros(len(begun), dtype=np.int64)
        step = 1 << int(most.max()).bit_length()
        while step := step >> 1:
            reach = np.minimum(known + step, most)
            equal = (one[left + reach] - from_one) * scale_one == (two[right + reach] - from_two) * scale_two
            known = np.where(equal, reach, known)
        lengths[begun] = known
        return lengths

    def runs(self, *, to_end: bool) -> list[Run]:
        """Equal stretches from the beginning of both to the end of the first, or of both."""
        found: list[Run] = []
        i = j = 0
        while i < len(self.first) and j < len(self.second):
            length = int(self.equal_from(np.array([i]), np.array([j]))[0])
            if length:
                found.append((i, j, length))
                i, j = i + length, j + length
                continue
            part = _Edits(self, i, j, to_end=to_end).search()
            if part is not None:
                found += part[0]
                i, j = part[1]
                continue
            place = self._next_common(i, j)
            if place is None:
                break
            i, j = place
        return found

    def _next_common(self, i: int, j: int) -> tuple[int, int] | None:
        """The nearest two places from which a stretch is equal."""
        for length in _GRAMS[1:]:
            one, two = self.grams(length)
            for reach in (_NEAR, max(len(one), len(two))):
                left, left_at = np.unique(one[i : i + reach], return_index=True)
                right, right_at = np.unique(two[j : j + reach], return_index=True)
                _, at_left, at_right = np.intersect1d(left, right, assume_unique=True, return_indices=True)
                if len(at_left):
                    ahead = left_at[at_left] + right_at[at_right]
                    best = int(ahead.argmin())
                    return i + int(left_at[at_left[best]]), j + int(right_at[at_right[best]])
        return None


class _Edits:
    """The search for the fewest edits from one place on: how far along each diagonal one gets with so many."""

    def __init__(self, matcher: _Matcher, i: int, j: int, *, to_end: bool) -> None:
        self.matcher = matcher
        self.origin = (i, j)
        self.to_end = to_end
        self.rows = len(matcher.first) - i
        self.columns = len(matcher.second) - j
        # Element k + _MOST_EDITS + 1 is how many of the first are used up on diagonal k (first less second).
        self.furthest = np.full(2 * _MOST_EDITS + 3, _UNREACHED, dtype=np.int64)
        self.furthest[_MOST_EDITS + 2] = 0
        self.history: list[Ints] = []

    def search(self) -> tuple[list[Run], tuple[int, int]] | None:
        """Equal stretches and the place after them; None if too many edits are needed."""
        for edits in range(_MOST_EDITS):
            diagonals = np.arange(-edits, edits + 1, 2)
            at = diagonals + _MOST_EDITS + 1
            self.history.append(self.furthest.copy())
            used = np.maximum(self.furthest[at + 1], self.furthest[at - 1] + 1)
            other = used - diagonals
            valid = (used >= 0) & (used <= self.rows) & (other >= 0) & (other <= self.columns)
            equal = np.zeros(len(used), dtype=np.int64)
            i, j = self.origin
            equal[valid] = self.matcher.equal_from(i + used[valid], j + other[valid])
            reached = np.where(valid, used + equal, _UNREACHED)
            self.furthest[at] = reached
            done = reached == self.rows
            if self.to_end:
                done &= reached - diagonals == self.columns
            if done.any():
                return self._path(edits, int(diagonals[done.argmax()]), self.rows)
            if edits and (equal.max() >= _CONFIDENT or reached.max() >= _WINDOW):
                best = int(equal.argmax() if equal.max() >= _CONFIDENT else reached.argmax())
                keep = self.rows if equal.max() >= _CONFIDENT else _WINDOW * 3 // 4
                return self._path(edits, int(diagonals[best]), keep)
        best = int((2 * reached - diagonals).argmax())
        if 2 * int(reached[best]) - int(diagonals[best]) < _MOST_EDITS + 2 * _WORTH:
            return None
        return self._path(_MOST_EDITS - 1, int(diagonals[best]), int(reached[best]) * 3 // 4)

    def _path(self, edits: int, diagonal: int, keep: int) -> tuple[list[Run], tuple[int, int]]:
        """The way that led here, without what lies behind ``keep`` elements of the first."""
        i, j = self.origin
        x = int(self.furthest[diagonal + _MOST_EDITS + 1])
        end = (i + x, j + x - diagonal)
        runs: list[Run] = []
        for number in range(edits, -1, -1):
            before = self.history[number]
            at = diagonal + _MOST_EDITS + 1
            down = before[at + 1] >= before[at - 1] + 1
            start = int(before[at + 1] if down else before[at - 1] + 1)
            if x > start:
                runs.append((i + start, j + start - diagonal, x - start))
            diagonal += 1 if down else -1
            x = int(before[diagonal + _MOST_EDITS + 1])
        runs.reverse()
        kept = [run for run in runs if run[0] - i < keep]
        if len(kept) < len(runs) and kept:
            end = (kept[-1][0] + kept[-1][2], kept[-1][1] + kept[-1][2])
            return kept, end
        return runs, end


def _anchors(matcher: _Matcher, cost: Ints) -> list[tuple[int, int]]:
    """Pairs of places, one in each sequence, that may well be the same; the likeliest first."""
    for length in (*_GRAMS, 1):
        left, right = _same_grams(*matcher.grams(length))
        if not len(left):
            continue
        shift = right - left
        # Where nearly all of the first lies within the second; if it does so nowhere, wherever it resembles it.
        over = max(_SAME_PLACE, len(matcher.first) // 10)
        within = (shift >= -over) & (shift + len(matcher.first) <= len(matcher.second) + over)
        if within.any():
            left, shift = left[within], shift[within]
        ordered = np.sort(shift)
        votes = np.searchsorted(ordered, ordered + _SAME_PLACE, side="right") - np.arange(len(ordered))
        cost_of = cost[np.clip(ordered, 0, len(cost) - 1)]
        outside = np.maximum(ordered + len(matcher.first) - len(matcher.second), 0)
        likely: list[int] = []
        for share, most in _CANDIDATES:
            good = np.flatnonzero(votes >= share * votes.max())
            for index in good[np.lexsort((-ordered[good], outside[good], cost_of[good]))].tolist():
                if len(likely) == most:
                    break
                if all(abs(int(ordered[index] - ordered[other])) > _SAME_PLACE for other in likely):
                    likely.append(index)
        anchors = []
        for index in likely:
            shifts, counts = np.unique(ordered[index : index + int(votes[index])], return_counts=True)
            best = int(shifts[counts.argmax()])
            at = int(left[shift == best].min())
            anchors.append((at, at + best))
        return anchors
    return []


def _same_grams(one: Hashes, two: Hashes) -> tuple[Ints, Ints]:
    """Places in the first and the second with equal stretches; if there are too many, those that repeat least."""
    order = np.argsort(two, kind="stable")
    ordered = two[order]
    low = np.searchsorted(ordered, one, side="left")
    count = np.searchsorted(ordered, one, side="right") - low
    usable = np.flatnonzero(count > 0)
    if int(count.sum()) > _MOST_PAIRS:
        usable = usable[np.argsort(count[usable], kind="stable")]
        usable = np.sort(usable[np.cumsum(count[usable]) <= _MOST_PAIRS])
    repeats = count[usable]
    left = np.repeat(usable, repeats)
    within = np.arange(len(left)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    right = order[np.repeat(low[usable], repeats) + within]
    return left.astype(np.int64), right.astype(np.int64)
