"""What is expected next: the pass before, whatever its order."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from vramfit.inference.streaming.call_order import CallOrder


def next_of(order: CallOrder) -> int:
    return next(order.upcoming())


def test_before_anything_is_known_layers_come_in_their_order() -> None:
    order = CallOrder(4)
    assert list(islice(order.upcoming(), 4)) == [0, 1, 2, 3]
    order.note(2)
    assert list(islice(order.upcoming(), 4)) == [3, 0, 1, 2]


@given(a_pass=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_from_the_third_pass_on_all_is_expected_where_a_pass_begins_as_no_other_place_of_it(
    a_pass: list[int],
) -> None:
    calls = [6, *a_pass]  # 6 comes once
    order = CallOrder(7)
    for number in calls * 2:
        order.note(number)
    for number in calls * 2:
        assert next_of(order) == number or number == 6
        order.note(number)
    for number in calls:
        assert next_of(order) == number
        order.note(number)


def test_memory_of_calls_does_not_grow() -> None:
    order = CallOrder(3)
    for number in range(50_000):
        order.note(number % 3)
    assert len(order._calls) < 10_000
    assert next_of(order) == 50_000 % 3
