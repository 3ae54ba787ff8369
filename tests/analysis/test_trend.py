"""Exact tests of growth, against enumeration of all orders, and their error rates on seeded series."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vramfit.analysis import trend
from vramfit.analysis.trend import (
    fading_p_value,
    growth_p_value,
    holm,
    late_share,
    mann_kendall,
    new_maxima,
    theil_sen,
)


def inversions(values: tuple[int, ...]) -> int:
    return sum(earlier > later for earlier, later in itertools.combinations(values, 2))


def maxima(values: tuple[int, ...]) -> int:
    return sum(value > max(values[:k]) for k, value in enumerate(values) if k)


@pytest.mark.parametrize("values", [(1, 2, 3, 4, 5), (1, 1, 2, 3, 3), (2, 2, 2, 5, 5, 9), (7, 7)])
def test_mann_kendall_is_the_share_of_orders_with_no_more_inversions(values: tuple[int, ...]) -> None:
    orders = list(itertools.permutations(values))
    for order in set(orders):
        share = sum(inversions(other) <= inversions(order) for other in orders) / len(orders)
        assert mann_kendall(order) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_new_maxima_is_the_share_of_orders_with_as_many(n: int) -> None:
    orders = list(itertools.permutations(range(n)))
    for order in orders[:: max(1, len(orders) // 50)]:
        share = sum(maxima(other) >= maxima(order) for other in orders) / len(orders)
        assert new_maxima(order) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("values", [(1, 1, 2, 2, 3), (4, 4, 4, 5, 6, 6)])
def test_ties_make_new_maxima_conservative(values: tuple[int, ...]) -> None:
    orders = list(itertools.permutations(values))
    for order in set(orders):
        share = sum(maxima(other) >= maxima(order) for other in orders) / len(orders)
        assert new_maxima(order) >= share - 1e-12


@pytest.mark.parametrize("n", range(2, 12))
def test_steady_growth_has_the_least_p_that_is_possible(n: int) -> None:
    assert growth_p_value(range(n)) == pytest.approx(1 / math.factorial(n))


def test_the_approximation_errs_a_little_to_the_safe_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(1)
    values = [(np.arange(50) * slope + rng.normal(size=50) * 100).astype(np.int64) for slope in range(6)]
    exact = [mann_kendall(one) for one in values]
    monkeypatch.setattr(trend, "_EXACT", 49)
    for p, true in zip([mann_kendall(one) for one in values], exact, strict=True):
        assert true <= p or true > 0.05
        assert p <= 1.25 * true or true < 1e-4
    assert mann_kendall(np.arange(200)) < 1e-30
    assert mann_kendall(np.zeros(200, dtype=np.int64)) == 1.0


@pytest.mark.parametrize("values", [(), (3,), (5, 5, 5, 5)])
def test_what_does_not_change_proves_nothing(values: tuple[int, ...]) -> None:
    assert growth_p_value(values) == 1.0


@given(st.integers(2, 30), st.integers(0, 10**12), st.integers(-(10**9), 10**9))
def test_theil_sen_gives_a_constant_slope_exactly(n: int, start: int, slope: int) -> None:
    assert theil_sen([start + slope * k for k in range(n)], range(n)) == slope


def test_theil_sen_counts_the_steps_between_uneven_places() -> None:
    places = [0, 3, 4, 9, 20]
    assert theil_sen([7 * place for place in places], places) == 7.0


def test_holm_multiplies_by_the_hypotheses_that_are_left() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_growth_that_stops_has_no_late_share_and_fades() -> None:
    stopped = [*range(10), *[9] * 10]
    assert late_share(stopped) == 0.0
    assert fading_p_value(stopped) < 1e-4
    steady = list(range(20))
    assert late_share(steady) == pytest.approx(1.0)
    assert fading_p_value(steady) == 1.0


def rejections(make: Callable[[np.random.Generator], NDArray[np.int64]], times: int = 1500) -> float:
    rng = np.random.default_rng(20240817)
    return float(np.mean([growth_p_value(make(rng)) <= 0.005 for _ in range(times)]))


@pytest.mark.parametrize("n", [6, 12, 30])
def test_noise_and_growing_buffers_are_called_growth_as_rarely_as_promised(n: int) -> None:
    noise = rejections(lambda rng: rng.integers(0, 10**9, n))
    buffers = rejections(lambda rng: np.maximum.accumulate(rng.integers(0, 10**9, n)))
    limit = 0.005 + 3 * math.sqrt(0.005 * 0.995 / 1500)
    assert noise <= limit
    assert buffers <= limit


@pytest.mark.parametrize(("n", "least"), [(10, 0.75), (20, 0.98)])
def test_growth_by_the_deviation_of_the_noise_is_found(n: int, least: float) -> None:
    found = rejections(lambda rng: (1e6 * (np.arange(n) + rng.normal(size=n))).astype(np.int64), 500)
    assert found >= least
