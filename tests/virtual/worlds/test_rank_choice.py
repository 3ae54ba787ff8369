"""Which ranks are run, and for which others each stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vramfit.errors import UsageError
from vramfit.virtual.worlds.rank_choice import ChoiceKind, Standing, between, rank_choice, standings


@pytest.mark.parametrize(
    ("text", "size", "first"),
    [
        ("auto", 8, (0, 7)),
        ("auto", 1, (0,)),
        ("all", 3, (0, 1, 2)),
        ("7", 8, (7,)),
        ("7,0, 2-4,3", 8, (0, 2, 3, 4, 7)),
        (5, 8, (5,)),
        ([6, 1], 8, (1, 6)),
    ],
)
def test_what_a_user_writes(text: str, size: int, first: tuple[int, ...]) -> None:
    assert rank_choice(text, size).first(size) == first


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8", "rank 8 is beyond a world of 8 ranks"),
        ("0-9", "rank 9 is beyond a world of 8 ranks"),
        ("first", "'first' names no rank"),
        ("", "'' names no rank"),
        ("-1", "'-1' names no rank"),
        ("4-2", "the ranks 4-2 go backwards"),
        ([], "no rank is named"),
        ([True], "True names no rank"),
    ],
)
def test_what_names_no_rank(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        rank_choice(text, 8)


def found(size: int, kind: Callable[[int], object]) -> dict[int, object]:
    """What `auto` runs without a bound."""
    kinds = {rank: kind(rank) for rank in rank_choice("auto", size).first(size)}
    while further := between(kinds, range(size)):
        kinds.update({rank: kind(rank) for rank in further})
    return kinds


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (4100, 7), (11008, 1024), (3, 8), (64, 8)])
def test_every_remainder_of_uneven_shards_is_found(rows: int, size: int) -> None:
    """Shards as `torch.chunk` cuts them: whole ones, one with the remainder, empty ones."""
    whole = -(-rows // size)
    kinds = found(size, lambda rank: max(0, min(whole, rows - rank * whole)))
    assert set(kinds.values()) == {max(0, min(whole, rows - rank * whole)) for rank in range(size)}
    told = standings(kinds, lambda rank: int(str(kinds[rank])), range(size))
    assert all(one.alike for one in told)
    assert len(kinds) + sum(one.last - one.first + 1 for one in told) == size


def test_alike_ranks_are_not_run() -> None:
    assert sorted(found(1024, lambda _: 0)) == [0, 1023]
    assert rank_choice("auto", 4).kind is ChoiceKind.AUTO


def test_the_larger_stands_for_ranks_between_two_that_differ() -> None:
    sizes = {0: 5, 9: 5, 12: 8, 15: 1}
    assert standings(sizes, lambda rank: sizes[rank], range(16)) == (
        Standing(rank=0, first=1, last=8, alike=True),
        Standing(rank=12, first=10, last=11, alike=False),
        Standing(rank=12, first=13, last=14, alike=False),
    )


def test_ranks_of_the_same_place_are_told_apart_from_ranks_between() -> None:
    kinds = {0: "a", 3: "b", 4: "a", 7: "b"}  # two groups of four
    order = (0, 1, 2, 3, 0, 1, 2, 3)
    assert between(kinds, order) == (1,)
    kinds |= {1: "b"}
    assert between(kinds, order) == ()
    assert standings(kinds, lambda _: 1, order) == (
        Standing(rank=1, first=2, last=2, alike=True),
        Standing(rank=1, first=5, last=5, alike=True, same_place=True),
        Standing(rank=1, first=6, last=6, alike=True),
    )


def test_a_kind_that_comes_again_leaves_the_ranks_between_in_doubt() -> None:
    kinds = {0: "a", 4: "b", 8: "a", 15: "a"}
    assert between(kinds, range(16)) == (2, 6, 11)  # those between two that differ first
    kinds |= {2: "a", 3: "a", 6: "b", 7: "b"}
    told = standings(kinds, lambda _: 1, range(16))
    assert {(one.first, one.last): one.alike for one in told} == {
        (1, 1): False,
        (5, 5): False,
        (9, 14): False,
    }


def test_more_changes_than_were_followed_leave_the_ranks_between_in_doubt() -> None:
    """As with FSDP's ``use_orig_params``: that 24 and 32 are alike says nothing of 28."""
    kinds = {0: 1, 8: 2, 16: 3, 24: 4, 32: 4, 63: 5}
    assert not any(one.alike for one in standings(kinds, lambda _: 1, range(64)))
    few = {0: 1, 8: 1, 16: 2, 24: 2, 63: 2}
    assert [one.alike for one in standings(few, lambda _: 1, range(64))] == [True, False, True, True]
