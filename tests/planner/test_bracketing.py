"""The largest number for which something holds, against looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vramfit.planner.largest_size import CEILING, bracket


@given(limit=st.integers(0, 5000), start=st.integers(0, 5000))
def test_the_largest_and_its_neighbour(limit: int, start: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert bracket(holds, start) == (limit, limit + 1)
    assert len(asked) <= 2 * (limit + start).bit_length() + 2
    assert min(asked) >= 1


def test_nothing_is_tried_beyond_the_ceiling() -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return True

    assert bracket(holds, 3) == (CEILING, CEILING)
    assert max(asked) == CEILING
