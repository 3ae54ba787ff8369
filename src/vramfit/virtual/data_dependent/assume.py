"""What is assumed where sizes depend on data that nobody computed, and how far that may be off.

NOTE [Error bars]
A result whose size is assumed carries an *extent*: the size shown, the least and the most that it could be. Whatever
is computed from it carries extents too (resting.py), so each storage has bytes that it shows, bytes that it could be
at least, and bytes that it could be at most. The meter sums all three; the highest sum of each is the peak and its
error bar. Sizes that closed libraries keep to themselves widen the same sums while they are held.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from traceback import walk_tb

from vramfit.errors import UsageError


class Assume(Enum):
    """How a size is chosen that depends on data."""

    UPPER = "upper"
    """The most that it could be: every element selected, every value distinct."""
    TYPICAL = "typical"
    """What is to be expected: shares that follow from how a mask was made, else half of the elements."""


def assumption(value: str | Assume) -> Assume:
    """What ``--assume`` names.

    Raises:
        UsageError: it names nothing.
    """
    try:
        return Assume(value)
    except ValueError:
        raise UsageError(f"nothing can be assumed as {value!r}", "Choose upper or typical") from None


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
        shape: of the tensor.
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


_TELLING = 256  # least size of which a multiple tells: smaller ones divide too much


def may_come_from(error: BaseException, sizes: Collection[int], lines: Collection[str]) -> bool:
    """Whether an error may come from an assumed size: its message tells one, or it was raised where one was assumed.

    Args:
        error: what ended the program.
        sizes: the assumed sizes, as the program saw them.
        lines: where they were assumed, as ``file:line``.
    """
    told = [int(number) for number in re.findall(r"\d{1,18}", str(error))]
    if any(n in sizes or any(n and s >= _TELLING and n % s == 0 for s in sizes) for n in told):
        return True
    return any(f"{f.f_code.co_filename}:{number}" in lines for f, number in walk_tb(error.__traceback__))
