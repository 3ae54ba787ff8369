"""The largest value for which something holds, against looking at all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.searching.allowed import Allowed, Listed, Multiples, divisors_of
from vramfit.searching.largest import (
    DOUBLING_STEPS,
    NEIGHBOURS_FIRST,
    Largest,
    LargestSearch,
    MeasuredLine,
    SearchEnd,
    Strategy,
    doubled_from,
    down_from,
    halved,
    largest_where,
)

CEILING = 1 << 24

LISTS = st.sets(st.integers(1, 3000), min_size=1, max_size=60).map(
    lambda values: Listed(tuple(sorted(values)))
)
MULTIPLES = st.builds(
    Multiples, of=st.integers(1, 60), least=st.integers(1, 500), most=st.integers(500, 3000)
)
DIVISORS = st.builds(divisors_of, st.integers(1, 5000))


def values_of(allowed: Allowed) -> list[int]:
    return [allowed.value_at(position) for position in range(allowed.first, allowed.last + 1)]


def confirmed(limit: int, strategy: Strategy) -> Largest[bool]:
    """A search for the largest allowed value up to a limit, compared with all of the allowed values."""
    asked: list[int] = []

    def holds(value: int) -> bool:
        asked.append(value)
        return value <= limit

    largest = largest_where(holds, strategy)
    values = values_of(strategy.allowed)
    assert largest.value == max((value for value in values if value <= limit), default=0)
    assert largest.failing == min((value for value in values if value > limit), default=0)
    assert asked == [tried.value for tried in largest.tries]
    assert len(set(asked)) == len(asked)
    assert set(asked) <= set(values)
    assert largest.confirmed
    tried = {one.value: one.fits for one in largest.tries}
    assert not largest.value or tried[largest.value]
    assert not largest.failing or not tried[largest.failing]
    return largest


@given(limit=st.integers(0, 5000), start=st.integers(0, 5000))
def test_the_largest_and_its_neighbour(limit: int, start: int) -> None:
    largest = largest_where(lambda value: value <= limit, doubled_from(start, CEILING))
    assert (largest.value, largest.failing) == (limit, limit + 1)
    assert len(largest.tries) <= 2 * (limit + start).bit_length() + 2
    assert min(tried.value for tried in largest.tries) >= 1


def test_nothing_is_tried_beyond_the_ceiling() -> None:
    largest = largest_where(lambda _: True, doubled_from(3, CEILING))
    assert (largest.value, largest.failing, largest.ended) == (CEILING, 0, SearchEnd.ALL_FIT)
    assert max(tried.value for tried in largest.tries) == CEILING


@given(
    limit=st.integers(0, 3100),
    allowed=st.one_of(LISTS, MULTIPLES, DIVISORS),
    start=st.integers(1, 4000),
    steps=st.sampled_from([(), (1,), NEIGHBOURS_FIRST, DOUBLING_STEPS, (1, 2, 3)]),
)
def test_each_constraint_is_kept(limit: int, allowed: Allowed, start: int, steps: tuple[int, ...]) -> None:
    largest = confirmed(limit, Strategy(allowed=allowed, start=start, steps=steps))
    taken = 0 if steps in ((), DOUBLING_STEPS) else len(steps)
    assert len(largest.tries) <= 2 * math.log2(allowed.value_at(allowed.last)) + 2 + taken


@given(limit=st.integers(0, 3000), start=st.integers(0, 3000))
def test_from_a_value_down_nothing_above_it_is_tried(limit: int, start: int) -> None:
    largest = confirmed(limit, down_from(start))
    assert all(tried.value <= start for tried in largest.tries)
    assert start == 0 or largest.tries[0].value == start
    assert len(largest.tries) <= 2 * math.log2(max(1, start - limit + 1)) + 2


@given(limit=st.integers(0, 3000), most=st.integers(0, 3000))
def test_where_the_next_is_known_to_fail_the_interval_is_halved(limit: int, most: int) -> None:
    largest = confirmed(min(limit, most), halved(most))
    assert len(largest.tries) <= (most + 1).bit_length()


@given(
    limit=st.integers(1, 100_000),
    start=st.integers(1, 100_000),
    closer=st.integers(1, 300),
    part=st.integers(0, 64),
)
def test_a_search_may_end_when_it_is_close_enough(limit: int, start: int, closer: int, part: int) -> None:
    exact = largest_where(lambda value: value <= limit, doubled_from(start, CEILING))
    largest = largest_where(
        lambda value: value <= limit, replace(doubled_from(start, CEILING, closer=closer), part=part)
    )
    tolerance = max(closer, largest.value // part if part else 1)
    assert largest.value <= limit < largest.failing <= largest.value + tolerance
    assert largest.tries == exact.tries[: len(largest.tries)]
    assert largest.confirmed == (largest.failing == largest.value + 1)


@given(
    limit=st.integers(0, 20_000),
    start=st.integers(1, 20_000),
    base=st.integers(0, 10**6),
    power=st.floats(0.5, 2.0),
    known=st.booleans(),
)
def test_a_line_through_measured_values_changes_the_tries_alone(
    limit: int, start: int, base: int, power: float, known: bool
) -> None:
    def bytes_at(value: int) -> int:
        return base + int(1000 * value**power)

    search = LargestSearch(
        bytes_at,
        lambda peak: peak <= bytes_at(limit),
        doubled_from(start, CEILING),
        line=MeasuredLine(measured=int, limit=bytes_at(limit) if known else 0),
    )
    largest = search.run()
    assert (largest.value, largest.failing, largest.ended) == (
        limit,
        limit + 1,
        SearchEnd.NEXT_FAILS if limit else SearchEnd.NOTHING_FITS,
    )
    assert len({tried.value for tried in largest.tries}) == len(largest.tries)
    assert largest.answer == (bytes_at(limit) if limit else None)


@given(
    jumps=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 10**6)), max_size=20),
    limit=st.integers(0, 4000),
    start=st.integers(1, 4000),
    most=st.integers(0, 3),
)
def test_a_line_through_values_that_jump_is_not_drawn_for_ever(
    jumps: list[tuple[int, int]], limit: int, start: int, most: int
) -> None:
    def bytes_at(value: int) -> int:
        return 1 + value + sum(size for at, size in jumps if at <= value)

    line: MeasuredLine[int] = MeasuredLine(measured=int, limit=bytes_at(limit), most=most)
    largest = LargestSearch(
        bytes_at,
        lambda peak: peak <= bytes_at(limit),
        Strategy(allowed=Multiples(most=4096), start=start),
        line=line,
    ).run()
    assert (largest.value, largest.failing) == (limit, limit + 1)
    assert len(largest.tries) <= 2 * math.log2(4096) + 2 + most * (1 + len(line.steps))


@pytest.mark.parametrize("multiple", [1, 8, 32])
def test_a_line_needs_few_tries_among_multiples_too(multiple: int) -> None:
    def bytes_at(value: int) -> int:
        return 10**9 + 1000 * value

    strategy = Strategy(allowed=Multiples(of=multiple, most=1 << 20))
    limit = bytes_at(100_003)
    plain = LargestSearch(bytes_at, lambda peak: peak <= limit, strategy).run()
    line = LargestSearch(
        bytes_at, lambda peak: peak <= limit, strategy, line=MeasuredLine(measured=int, limit=limit)
    ).run()
    assert line.value == plain.value == 100_003 // multiple * multiple
    assert len(line.tries) <= len(plain.tries) / 2 < len(plain.tries)


def test_what_was_seen_is_there_after_an_error_and_after_a_stop() -> None:
    def ask(value: int) -> bool:
        if value == 16:
            raise KeyboardInterrupt
        return True

    search = LargestSearch(ask, bool, doubled_from(1, CEILING))
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert (search.result.value, search.result.failing, search.result.ended) == (8, 0, SearchEnd.STOPPED)
    assert not search.result.confirmed

    asked: list[int] = []
    stopped = LargestSearch(
        lambda value: asked.append(value) or value <= 5,
        bool,
        doubled_from(2, CEILING),
        stop=lambda: len(asked) == 3,
    ).run()
    assert [(tried.value, tried.fits) for tried in stopped.tries] == [(2, True), (4, True), (8, False)]
    assert (stopped.value, stopped.failing, stopped.ended) == (4, 8, SearchEnd.STOPPED)


def test_nothing_is_tried_where_nothing_is_allowed() -> None:
    largest = largest_where(lambda _: True, Strategy(allowed=Multiples(of=8, most=7)))
    assert (largest.value, largest.failing, largest.tries) == (0, 0, ())
    assert largest.ended is SearchEnd.NOTHING_FITS
