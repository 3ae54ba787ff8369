"""Searches by an order of candidates, and several sizes one after another, against all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.searching.allowed import Listed, Multiples, divisors_of
from vramfit.searching.largest import NEIGHBOURS_FIRST, SearchEnd, Strategy
from vramfit.searching.orders import first_of, go_by, largest_in_order
from vramfit.searching.tries import Tries


@given(st.lists(st.integers(0, 20), min_size=1, unique=True), st.integers(0, 20))
def test_the_first_that_does(order: list[int], limit: int) -> None:
    asked: list[int] = []

    def ask(candidate: int) -> int:
        asked.append(candidate)
        return candidate

    first = first_of(order, ask, lambda answer: answer <= limit)
    enough = next((candidate for candidate in order if candidate <= limit), None)
    assert first.enough == (enough is not None)
    assert first.candidate == first.answer == (order[-1] if enough is None else enough)
    assert asked == order[: order.index(first.candidate) + 1]


def test_an_order_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        first_of((), str, bool)


def test_what_promises_most_is_tried_until_nothing_becomes_better() -> None:
    scores = [5.0, 3.0, 4.0, math.inf, 3.0, 2.0, 9.0, 9.0, 9.0, 1.0]

    def tried(most: int, patience: int, start: int = 0) -> list[int]:
        tries = Tries(lambda candidate: scores[candidate])
        for candidate in range(start):
            tries(candidate)
        go_by(
            tries,
            lambda: len(tries) if len(tries) < len(scores) else None,
            float,
            most=most,
            patience=patience,
        )
        return list(tries.answers)

    assert tried(100, 100) == list(range(10))
    assert tried(4, 100) == [0, 1, 2, 3]
    assert tried(4, 100, start=6) == [0, 1, 2, 3, 4, 5]
    assert tried(100, 3) == [0, 1, 2, 3, 4]  # 3.0 again is no better
    assert tried(100, 4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tried(100, 3, start=6) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


ALLOWED = [
    Multiples(most=12),
    Multiples(of=4, least=6, most=30),
    divisors_of(48),
    Listed((2, 3, 7, 20)),
    Listed((5,)),
]


@given(
    choices=st.lists(st.sampled_from(ALLOWED), min_size=1, max_size=3),
    weights=st.tuples(*[st.integers(0, 9)] * 3),
    limit=st.integers(0, 400),
    start=st.integers(1, 40),
    steps=st.sampled_from([(), NEIGHBOURS_FIRST]),
)
def test_sizes_are_raised_in_their_order(
    choices: list[Multiples | Listed],
    weights: tuple[int, ...],
    limit: int,
    start: int,
    steps: tuple[int, ...],
) -> None:
    names = "abc"[: len(choices)]

    def need(sizes: Mapping[str, int]) -> int:
        return sum(weight * sizes[name] for weight, name in zip(weights, names, strict=False)) + math.prod(
            sizes.values()
        )

    told: list[dict[str, int]] = []
    found = largest_in_order(
        need,
        lambda needed: needed <= limit,
        {
            name: Strategy(allowed=one, start=start, steps=steps)
            for name, one in zip(names, choices, strict=True)
        },
        progress=lambda sizes: told.append(dict(sizes)),
    )
    grid = itertools.product(
        *([one.value_at(at) for at in range(one.first, one.last + 1)] for one in choices)
    )
    fitting = [sizes for sizes in grid if need(dict(zip(names, sizes, strict=True))) <= limit]
    assert tuple(found.sizes.values()) == max(fitting, default=())
    assert told == [dict(sizes) for sizes, _ in found.tries]
    assert len({tuple(sizes.values()) for sizes in told}) == len(told)
    assert all(answer == need(sizes) for sizes, answer in found.tries)
    assert len(told) <= sum(2 * math.log2(one.value_at(one.last)) + 2 + len(steps) for one in choices)


def test_sizes_that_were_not_reached_have_their_smallest() -> None:
    runs: list[Mapping[str, int]] = []

    def run(sizes: Mapping[str, int]) -> int:
        runs.append(sizes)
        return sizes["batch_size"] * sizes["length"]

    strategies = {
        "length": Strategy(allowed=Multiples(of=64, most=1024), start=256),
        "batch_size": Strategy(allowed=Multiples(least=2, most=64), start=4),
    }
    whole = largest_in_order(run, lambda need: need <= 1100, strategies)
    assert whole.sizes == {"length": 512, "batch_size": 2}
    assert whole.largest["length"].ended is SearchEnd.NEXT_FAILS
    assert whole.largest["batch_size"].failing == 3
    runs.clear()
    stopped = largest_in_order(run, lambda need: need <= 1100, strategies, stop=lambda: len(runs) == 2)
    assert stopped.sizes == {"length": 512, "batch_size": 2}
    assert stopped.largest["length"].ended is SearchEnd.STOPPED
    nothing = largest_in_order(run, lambda need: need <= 1, strategies)
    assert (nothing.sizes, list(nothing.largest)) == ({}, ["length"])
    refused = {**strategies, "batch_size": Strategy(allowed=Multiples(of=8, most=7))}
    assert largest_in_order(run, bool, refused).tries == ()
