"""What is assumed where sizes depend on data that nobody computed, and how far that may be off.

NOTE [Error bars]
A result whose size is assumed carries an *extent*: the size shown, the least and the most that it could be. Whatever
is computed from it and has a dimension of that size carries the extent too, so each storage has bytes that it shows,
bytes that it could be at least, and bytes that it could be at most. The meter sums all three; the highest sum of each
is the peak and its error bar. Sizes that closed libraries keep to themselves widen the same sums while they are held.

An extent is recognised by its size: a dimension that has the same size by chance makes the bar wider than it need be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from vramfit.errors import UsageError

# Below this, a multiple of an assumed size is as likely a coincidence as a flattened dimension.
_TELLING = 256


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


def resting_on(shape: Sequence[int], extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Those of some extents on which a shape rests."""
    return tuple(extent for extent in extents if _times(shape, extent))


def bounds(nbytes: int, shape: Sequence[int], extents: Iterable[Extent]) -> tuple[int, int]:
    """Least and most bytes of a tensor that shows ``nbytes`` and rests on assumed sizes."""
    low = high = float(nbytes)
    for extent in extents:
        times = _times(shape, extent)
        low *= (extent.low / extent.shown) ** times
        high *= (extent.high / extent.shown) ** times
    return int(low), int(high)


def _times(shape: Sequence[int], extent: Extent) -> int:
    """How many dimensions of a shape have an assumed size."""
    if extent.shown < 2:  # every tensor has such dimensions
        return 0
    exact = sum(size == extent.shown for size in shape)
    if exact or extent.shown < _TELLING:
        return exact
    return int(any(size and size % extent.shown == 0 for size in shape))
