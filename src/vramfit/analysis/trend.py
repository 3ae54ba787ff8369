"""Exact tests for growth in short series: is it more than noise, and does it go on?

NOTE [Why two tests of growth]
A leak is told from two kinds of series that also go up. Levels that only fluctuate are exchangeable: every order of
the same values is as likely. Mann and Kendall's test is exact against that, ties included. A buffer that grows to the
largest batch so far is a running maximum of such values: it never falls, so that a test of trend rejects it nearly
always. But the k-th of exchangeable values is a new maximum with probability 1/k at most, independently of the others
(Renyi 1962; Foster and Stuart 1954), and a running maximum has its new maxima at the same places. Counting them is
therefore exact against both. Growth is called only where both tests reject: whichever of the two a series is, the
chance of a false call is at most the level (an intersection-union test).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_EXACT = 50  # longer series take the normal approximation, whose tail is the heavier one: its p is a little too large


def growth_p_value(levels: Sequence[int] | NDArray[np.int64]) -> float:
    """The chance of at least this much growth in fluctuating levels, or in a running maximum of them.

    It is the larger of `mann_kendall` and `new_maxima`. Steady growth over n levels gives 1/n!, the least possible.
    """
    return max(mann_kendall(levels), new_maxima(levels))


def mann_kendall(levels: Sequence[int] | NDArray[np.int64]) -> float:
    """One-sided p value of an upward trend: the share of all orders of these values with at most as many inversions.

    Exact, given the ties, up to 50 levels; beyond that the normal approximation with continuity correction.
    (H. B. Mann, Econometrica 13, 1945; M. G. Kendall, Rank Correlation Methods, 1970, for ties.)
    """
    values = np.asarray(levels)
    if len(values) < 2:
        return 1.0
    _, ties = np.unique(values, return_counts=True)
    later = np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)]
    if len(values) <= _EXACT:
        counts = _orders_by_inversions(tuple(sorted(ties.tolist())))
        inversions = int((later < 0).sum())
        return sum(counts[: inversions + 1]) / sum(counts)
    score, n = int(later.sum()), len(values)
    variance = (n * (n - 1) * (2 * n + 5) - int((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return 0.5 * math.erfc((score - 1) / math.sqrt(2 * variance)) if variance else 1.0


@lru_cache(maxsize=256)
def _orders_by_inversions(ties: tuple[int, ...]) -> tuple[int, ...]:
    """How many orders of a multiset with these multiplicities have 0, 1, 2, ... inversions.

    The generating function is the q-multinomial coefficient: the product of (1 - q^i) over i up to n, divided by the
    same product for each multiplicity (R. P. Stanley, Enumerative Combinatorics 1, 1.7.1).
    """
    n = sum(ties)
    length = (n * n - sum(tie * tie for tie in ties)) // 2 + 1
    counts = [1] + [0] * (length - 1)
    for i in range(1, n + 1):
        for position in range(length - 1, i - 1, -1):
            counts[position] -= counts[position - i]
    for tie in ties:
        for i in range(1, tie + 1):
            for position in range(i, length):
                counts[position] += counts[position - i]
    return tuple(counts)


def new_maxima(levels: Sequence[int] | NDArray[np.int64]) -> float:
    """The chance that exchangeable values have at least as many new maxima after the first.

    Among values without ties the k-th is the largest so far with probability 1/k, independently; ties only make new
    maxima rarer, so that the p value is exact or too large.
    """
    values = np.asarray(levels)
    if len(values) < 2:
        return 1.0
    found = int((values[1:] > np.maximum.accumulate(values)[:-1]).sum())
    return float(_maxima_tail(len(values))[found])


@lru_cache(maxsize=256)
def _maxima_tail(n: int) -> NDArray[np.float64]:
    """The chance of at least 0, 1, 2, ... new maxima after the first of n values."""
    chances = np.zeros(n)
    chances[0] = 1.0
    for k in range(2, n + 1):
        chances[1:] = chances[1:] * (1 - 1 / k) + chances[:-1] / k
        chances[0] *= 1 - 1 / k
    return np.cumsum(chances[::-1])[::-1]


def fading_p_value(levels: Sequence[int] | NDArray[np.int64]) -> float:
    """The chance that growth at a constant rate slows down as much as this: Mann and Kendall on the increments."""
    return mann_kendall(-np.diff(np.asarray(levels)))


def late_share(levels: Sequence[int] | NDArray[np.int64]) -> float:
    """Growth in the last third of the increments, as a multiple of what a constant rate would have given there.

    1 for steady growth, 0 for growth that has stopped; 0 as well where nothing grew in all.
    """
    values = np.asarray(levels)
    increments = len(values) - 1
    total = int(values[-1] - values[0]) if increments > 0 else 0
    if total <= 0:
        return 0.0
    last = min(increments, max(2, math.ceil(increments / 3)))
    return float(int(values[-1] - values[-1 - last]) / total * increments / last)


def theil_sen(levels: Sequence[int] | NDArray[np.int64], at: Sequence[int] | NDArray[np.int64]) -> float:
    """The median slope over all pairs: exactly k for growth of k per step, and deaf to single outliers.

    Args:
        at: where on the axis each lies, strictly ascending.
    """
    values, places = np.asarray(levels), np.asarray(at)
    if len(values) < 2:
        return 0.0
    i, j = np.triu_indices(len(values), 1)
    return float(np.median((values[j] - values[i]) / (places[j] - places[i])))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values in the order given: the chance of any false rejection among all of them.

    (S. Holm, Scandinavian Journal of Statistics 6, 1979.)
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted
