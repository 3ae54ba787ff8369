"""How assumed sizes are recognised in the shapes that are made from them."""

from __future__ import annotations

import pytest

from vramfit.virtual.data_dependent.assume import (
    Extent,
    Numbers,
    Resting,
    bounds,
    concatenated,
    merged,
    moved,
)

ROWS = Extent(1000, 0, 2000)


def rest(shape: tuple[int, ...], *known: int, joined: bool = False) -> tuple[Extent, ...]:
    return Resting((ROWS,), frozenset(known), joined).of(shape)


def test_a_dimension_of_the_same_size_rests_on_the_extent() -> None:
    assert rest((1000, 64)) == (ROWS,)
    assert rest((64, 1000), 64, 2000) == (ROWS,)


def test_sizes_that_arguments_have_or_the_call_names_rest_on_nothing() -> None:
    assert rest((64, 65), 64, 65) == ()
    assert rest(()) == ()
    assert rest((1, 64), 64) == ()


def test_a_new_size_was_made_from_the_assumed_one() -> None:
    assert rest((64_000,), 64) == (Extent(64_000, 0, 128_000),)  # flattened
    assert rest((999, 64), 64) == (Extent(999, 0, 1999),)  # cut
    assert rest((500, 64), 64) == (Extent(500, 0, 1500),)  # every second one: 1000 of 2000 lie within
    assert rest((1007, 64), 64, joined=True) == (Extent(1007, 7, 2007),)
    assert rest((3000, 8), 8) == (Extent(3000, 0, 6000),)  # repeated


def test_both_ends_move_with_the_size() -> None:
    extent = Extent(100, 60, 300)
    assert moved(extent, 90) == Extent(90, 50, 290)
    assert moved(extent, 200) == Extent(200, 120, 600)
    assert moved(extent, 110, joined=True) == Extent(110, 70, 310)
    assert moved(extent, 30) == Extent(30, 0, 230)


def test_tensors_put_together_sum_their_extents() -> None:
    along = concatenated([((1000, 4), (ROWS,)), ((7, 4), ()), ((0,), ())], 0, 1007)
    assert along == Extent(1007, 7, 2007)
    assert concatenated([((5, 4), ()), ((7, 4), ())], 0, 12) is None
    assert concatenated([((0, 4), (Extent(0, 0, 9),)), ((7, 4), ())], 0, 7) == Extent(7, 7, 16)


def test_bytes_follow_each_dimension() -> None:
    assert bounds(4000, (1000,), (ROWS,)) == (0, 8000)
    assert bounds(4_000_000, (1000, 1000), (Extent(1000, 500, 2000),)) == (1_000_000, 16_000_000)
    assert bounds(0, (0, 8), (Extent(0, 0, 100),), 4) == (0, 3200)
    assert bounds(4, (1, 1, 1), (Extent(1, 0, 5),), 4) == (0, 20)  # one of them is the assumed one


def test_extents_of_one_size_become_the_widest() -> None:
    assert merged((ROWS,), (Extent(1000, 10, 3000), Extent(7, 7, 7))) == (
        Extent(1000, 0, 3000),
        Extent(7, 7, 7),
    )


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (5000, (Extent(5000, 0, 8000),)),
        (5001, (Extent(5001, 1, 8001),)),
        (10_000, (Extent(10_000, 0, 16_000),)),
        (2500, (Extent(2500, 0, 4000),)),
        (5100, ()),
        (45_000, ()),
    ],
)
def test_guessed_counts_are_followed_through_a_little_arithmetic(
    size: int, found: tuple[Extent, ...]
) -> None:
    numbers = Numbers()
    assert numbers.assume(Extent(5000, 0, 8000), count=True)
    assert numbers.named((size,)) == found


def test_assumed_sizes_are_recognised_only_where_they_tell() -> None:
    numbers = Numbers()
    assert not numbers.assume(Extent(64, 0, 100))
    assert not numbers.assume(Extent(5000, 5000, 5000))
    numbers.assume(Extent(5000, 0, 8000))
    assert numbers.named((64, 5000)) == (Extent(5000, 0, 8000),)
    assert numbers.named((10_000,)) == ()
    numbers.see((5000, 3))
    assert numbers.named((5000,)) == ()  # something has this size anyway
    numbers.assume(Extent(6000, 0, 6000))
    numbers.see((6000,))
    assert numbers.named((6000,)) == (Extent(6000, 0, 6000),)  # it can only be less
