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
    while further := between(kinds):
        kinds.update({rank: kind(rank) for rank in further})
    return kinds


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (4100, 7), (11008, 1024), (3, 8), (64, 8)])
def test_every_remainder_of_uneven_shards_is_found(rows: int, size: int) -> None:
    """Shards as `torch.chunk` cuts them: whole ones, one with the remainder, empty ones."""
    whole = -(-rows // size)
    kinds = found(size, lambda rank: max(0, min(whole, rows - rank * whole)))
    assert set(kinds.values()) == {max(0, min(whole, rows - rank * whole)) for rank in range(size)}
    told = standings(kinds, lambda rank: int(str(kinds[rank])))
    assert all(one.alike for one in told)
    assert len(kinds) + sum(one.last - one.first + 1 for one in told) == size


def test_alike_ranks_are_not_run() -> None:
    assert sorted(found(1024, lambda _: 0)) == [0, 1023]
    assert rank_choice("auto", 4).kind is ChoiceKind.AUTO


def test_the_larger_stands_for_ranks_between_two_that_differ() -> None:
    sizes = {0: 5, 9: 5, 12: 8, 15: 1}
    assert standings(sizes, lambda rank: sizes[rank]) == (
        Standing(rank=0, first=1, last=8, alike=True),
        Standing(rank=12, first=10, last=11, alike=False),
        Standing(rank=12, first=13, last=14, alike=False),
    )
