"""Allowed values by their positions, against lists of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import UsageError
from vramfit.searching.allowed import Allowed, Listed, Multiples, divisors_of


def check(allowed: Allowed, values: list[int]) -> None:
    positions = range(allowed.first, allowed.last + 1)
    assert [allowed.value_at(position) for position in positions] == values
    for value in range(1, 200) if values else ():
        position = allowed.position_of(value)
        below = [one for one in values if one <= value]
        if not below:
            assert position < allowed.first
        elif value <= values[-1]:
            assert allowed.value_at(position) == below[-1]
        else:
            assert position >= allowed.last


@given(of=st.integers(1, 50), least=st.integers(1, 150), most=st.integers(0, 150))
def test_multiples(of: int, least: int, most: int) -> None:
    check(Multiples(of=of, least=least, most=most), [n for n in range(least, most + 1) if n % of == 0])


@given(number=st.integers(1, 400), multiple=st.integers(1, 8))
def test_divisors(number: int, multiple: int) -> None:
    divisors = [n for n in range(1, number + 1) if number % n == 0 and n % multiple == 0]
    check(divisors_of(number, multiple_of=multiple), divisors)


@given(st.sets(st.integers(1, 150)))
def test_lists(values: set[int]) -> None:
    check(Listed(tuple(sorted(values))), sorted(values))


def test_what_is_no_choice_of_values_is_refused() -> None:
    for values in ((2, 1), (1, 1), (0, 1)):
        with pytest.raises(UsageError, match="not ascending whole numbers of at least 1"):
            Listed(values)
    with pytest.raises(UsageError, match="of is 0"):
        Multiples(of=0, most=8)
    with pytest.raises(UsageError, match="least is 0"):
        Multiples(least=0, most=8)
    with pytest.raises(UsageError, match="0 has no divisors"):
        divisors_of(0)
