"""What is assumed where sizes depend on data that nobody computed, and how far that may be off.

NOTE [Error bars]
A result whose size is assumed carries an *extent*: the size shown, the least and the most that it could be. Whatever
is computed from it carries extents too (`Resting`), so each storage has bytes that it shows, bytes that it could be
at least, and bytes that it could be at most. The meter sums all three; the highest sum of each is the peak and its
error bar. Sizes that closed libraries keep to themselves widen the same sums while they are held.

NOTE [Following assumed sizes]
Nothing marks a number of Python as assumed, so an extent is recognised by its size:

1. A dimension of a result that has the size of an extent of an argument rests on it.
2. Where there is none, one dimension whose size no argument has and which the call does not name rests on it: it was
   cut (``y[1:]``, ``y[::2]``), joined (``cat``, ``pad``), flattened or repeated from one that did. Both ends of the
   extent move as they would in the widest of these cases.
3. A size that the program names itself (``torch.empty(n)``) rests on an assumed size or a guessed count of at least
   `TELLING` that it equals. A guessed count is followed through a little arithmetic (``n + 1``, ``2 * n``) too.

A dimension that has such a size by chance makes the bar wider than it need be. What is not followed: sizes below
`TELLING` that the program names, and further arithmetic on numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from traceback import walk_tb


@dataclass(frozen=True, slots=True)
class Extent:
    """One assumed size of a dimension, in elements.

    Attributes:
        shown: the size that the program sees.
        low: the least that it could be.
        high: the most.
    """

    shown: int
    low: int
    high: int


def merged(*groups: Iterable[Extent]) -> tuple[Extent, ...]:
    """One extent for each size shown, the widest of those given."""
    found: dict[int, Extent] = {}
    for group in groups:
        for extent in group:
            known = found.get(extent.shown)
            if known is None:
                found[extent.shown] = extent
            elif known != extent:
                low, high = min(known.low, extent.low), max(known.high, extent.high)
                found[extent.shown] = Extent(extent.shown, low, high)
    return tuple(found.values())


def bounds(
    nbytes: int, shape: Sequence[int], extents: Iterable[Extent], itemsize: int = 1
) -> tuple[int, int]:
    """Least and most bytes of a tensor that shows ``nbytes`` and rests on assumed sizes.

    Args:
        nbytes: of its storage.
        extents: each of the size of a dimension, or of several.
        itemsize: bytes of an element, for tensors that show none.
    """
    low = high = float(nbytes)
    if not nbytes:
        high = float(itemsize)
        for size in shape:
            high *= next((e.high for e in extents if e.shown == size), size)
        return 0, int(high)
    for extent in extents:
        if extent.shown:
            times = shape.count(extent.shown)
            times = min(1, times) if extent.shown == 1 else times  # most tensors have further dimensions of 1
            low *= (extent.low / extent.shown) ** times
            high *= (extent.high / extent.shown) ** times
    return int(low), -int(-high // 1)


_TELLING = 256  # least size whose multiples count: smaller ones divide too many numbers


def may_come_from(error: BaseException, sizes: Collection[int], lines: Collection[str]) -> bool:
    """Whether an error may come from an assumed size: its message names one, or it was raised where one was assumed.

    Args:
        error: what ended the program.
        sizes: the assumed sizes, as the program saw them.
        lines: where they were assumed, as ``file:line``.
    """
    told = [int(number) for number in re.findall(r"\d{1,18}", str(error))]
    if any(n in sizes or any(n and s >= _TELLING and n % s == 0 for s in sizes) for n in told):
        return True
    return any(f"{f.f_code.co_filename}:{number}" in lines for f, number in walk_tb(error.__traceback__))


# -- which dimensions of a tensor rest on assumed sizes: see NOTE [Following assumed sizes] ------------------


TELLING = 256
"""Least size that is recognised among the numbers of a program: smaller ones are too often equal by chance."""

_NEAR = 8  # a count and a few more: a header, a class token
_TIMES = 8  # a count times the coordinates of a box, heads, bytes of an element


@dataclass(frozen=True, slots=True)
class Resting:
    """What the results of one op may rest on.

    Attributes:
        extents: of its arguments, and those that it assumes itself.
        known: sizes of its arguments' dimensions and those that the call names.
        joined: it puts tensors together, so what is longer grew by a fixed length.
    """

    extents: tuple[Extent, ...] = ()
    known: frozenset[int] = frozenset()
    joined: bool = False

    def of(self, shape: Sequence[int]) -> tuple[Extent, ...]:
        """The extents on which a tensor of this shape rests."""
        found: list[Extent] = []
        for extent in self.extents:
            if extent.shown in shape:
                found.append(extent)
                continue
            taken = self.known | {e.shown for e in self.extents}
            free = [size for size in shape if size > 1 and size not in taken]
            if free and extent.shown > 1:
                whole = next((size for size in free if size % extent.shown == 0), None)
                found.append(moved(extent, max(free) if whole is None else whole, joined=self.joined))
        return merged(found)


def moved(extent: Extent, size: int, *, joined: bool = False) -> Extent:
    """The extent of a dimension that was made from an assumed one and now has another size.

    Args:
        extent: the assumed one; it shows at least 1.
        size: of the dimension now.
        joined: what it has more was added to it; otherwise it was repeated or flattened.
    """
    if joined or size < extent.shown:
        return Extent(size, max(0, size + extent.low - extent.shown), size + extent.high - extent.shown)
    return Extent(size, size * extent.low // extent.shown, -(-size * extent.high // extent.shown))


def concatenated(
    parts: Iterable[tuple[Sequence[int], tuple[Extent, ...]]], axis: int, size: int
) -> Extent | None:
    """The extent of the dimension along which tensors were put together; None where none of them rests on any.

    Args:
        parts: shape and extents of each tensor.
    """
    low = high = 0
    for shape, extents in parts:
        if len(shape) <= axis:  # cat still takes empty tensors of one dimension
            continue
        extent = next((e for e in extents if e.shown == shape[axis]), None)
        low += shape[axis] if extent is None else extent.low
        high += shape[axis] if extent is None else extent.high
    return None if low == high else Extent(size, low, high)


class Numbers:
    """The assumed sizes and guessed counts of a run that a program may have as numbers."""

    def __init__(self) -> None:
        self._sizes: dict[int, Extent] = {}
        self._counts: dict[int, Extent] = {}
        self._certain: set[int] = set()

    def assume(self, extent: Extent, *, count: bool = False) -> bool:
        """Remember an assumed size, or a guessed count, that the program can read; whether it can be recognised."""
        if extent.shown < TELLING or extent.low == extent.high:
            return False
        table = self._counts if count else self._sizes
        known = table.get(extent.shown)
        table[extent.shown] = extent if known is None else merged((known, extent))[0]
        return True

    def see(self, shape: Iterable[int]) -> None:
        """Remember the sizes of a tensor that rests on nothing assumed."""
        self._certain.update(shape)

    def named(self, sizes: Iterable[int]) -> tuple[Extent, ...]:
        """Extents of sizes that a call names. One that a tensor had anyway could be more only by chance."""
        found = [extent for size in sizes if size >= TELLING for extent in self._matching(size)]
        return merged(e for e in found if e.shown not in self._certain or e.high == e.shown)

    def _matching(self, size: int) -> list[Extent]:
        exact = [table[size] for table in (self._sizes, self._counts) if size in table]
        if exact:
            return exact
        near = [c for c in self._counts.values() if abs(c.shown - size) <= _NEAR]
        if near:
            return [moved(c, size, joined=True) for c in near]
        multiples = [
            c
            for c in self._counts.values()
            if (size % c.shown == 0 and size // c.shown <= _TIMES)
            or (c.shown % size == 0 and c.shown // size <= _TIMES)
        ]
        return [Extent(size, size * c.low // c.shown, -(-size * c.high // c.shown)) for c in multiples]
