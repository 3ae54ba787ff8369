"""The largest number for which something holds: by doubling or halving, and then by bisection."""

from __future__ import annotations

from collections.abc import Callable

CEILING = 1 << 24
"""No number is tried beyond."""


def bracket(holds: Callable[[int], bool], start: int, *, closer: int = 1) -> tuple[int, int]:
    """The largest number that holds and its neighbour, which was seen not to; 0 and 1 where none holds.

    At `CEILING` both are the same.

    Args:
        holds: whether it does for a number; where it does for one it has to for all below.
        start: where to begin; 1 if it is less.
        closer: how far apart the two may be.
    """
    low, high = 0, max(1, start)
    while holds(high):
        low = high
        if high >= CEILING:
            return low, high
        high = min(2 * high, CEILING)
    if low == 0:
        while high > 1 and not holds(high // 2):
            high //= 2
        low = high // 2
    return bisected(holds, low, high, closer=closer)


def bisected(holds: Callable[[int], bool], low: int, high: int, *, closer: int = 1) -> tuple[int, int]:
    """A number that holds and one that does not, no farther apart than `closer`, between two such."""
    while high - low > closer:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
