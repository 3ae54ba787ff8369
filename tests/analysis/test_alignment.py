import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vramfit.analysis import Alignment, Ends, align

Ints = NDArray[np.int64]


def numbers(text: str) -> Ints:
    return np.array([ord(character) for character in text], dtype=np.int64)


def in_common(first: Ints, second: Ints) -> int:
    """Length of the longest common subsequence, by the textbook."""
    best = np.zeros((len(first) + 1, len(second) + 1), dtype=np.int64)
    for i, one in enumerate(first.tolist()):
        for j, other in enumerate(second.tolist()):
            best[i + 1, j + 1] = best[i, j] + 1 if one == other else max(best[i, j + 1], best[i + 1, j])
    return int(best[-1, -1])


def check(found: Alignment, first: Ints, second: Ints) -> None:
    assert (first[found.first] == second[found.second]).all()
    assert (np.diff(found.first) > 0).all()
    assert (np.diff(found.second) > 0).all()
    assert 0 <= found.start <= found.stop <= len(second)


SHORT = st.lists(st.integers(0, 3), max_size=30).map(lambda values: np.array(values, dtype=np.int64))


@settings(max_examples=150, deadline=None)
@given(SHORT, SHORT)
def test_short_sequences_have_as_much_in_common_as_can_be(first: Ints, second: Ints) -> None:
    found = align(first, second)
    check(found, first, second)
    assert len(found.first) == in_common(first, second)
    assert (found.start, found.stop) == (0, len(second))


@pytest.mark.parametrize(
    ("first", "second", "edits"),
    [
        ("abcabba", "abcabba", 0),
        ("abc", "abxc", 1),
        ("abxc", "abc", 1),
        ("", "ab", 2),
        ("abcabba", "cbabac", 5),
    ],
)
def test_edits_are_the_fewest(first: str, second: str, edits: int) -> None:
    found = align(numbers(first), numbers(second))
    assert len(first) + len(second) - 2 * len(found.first) == edits


def test_nothing_in_common_aligns_nothing() -> None:
    for free in Ends:
        found = align(np.zeros(5000, dtype=np.int64), np.ones(4000, dtype=np.int64), free=free)
        assert len(found.first) == 0
        assert (found.start, found.stop) == (0, 4000)


def program(steps: int) -> Ints:
    """A beginning of its own, then steps of 32 equal layers and an optimizer."""
    chance = np.random.default_rng(1)
    layer = chance.integers(0, 60, 150)
    step = np.concatenate([np.tile(layer, 32), chance.integers(60, 100, 3000)])
    return np.concatenate([chance.integers(0, 1000, 5000), np.tile(step, steps)])


def disturbed(sequence: Ints, share: float) -> tuple[Ints, int]:
    """Leave out some elements and replace others; also how many are still the same."""
    chance = np.random.default_rng(2)
    kept = sequence[chance.random(len(sequence)) > share].copy()
    replaced = chance.random(len(kept)) < share
    kept[replaced] = 5000 + np.arange(int(replaced.sum()))
    return kept, int((~replaced).sum())


@pytest.mark.parametrize(("share", "least"), [(0.0, 1.0), (0.0005, 0.999), (0.02, 0.99)])
def test_long_sequences_that_repeat_themselves_are_aligned(share: float, least: float) -> None:
    second = program(15)
    first, same = disturbed(second, share)
    found = align(first, second, free=Ends.TAIL)
    check(found, first, second)
    assert len(second) > 100_000
    assert len(found.first) >= least * same
    assert (found.start, found.stop) == (0, len(second))


@pytest.mark.parametrize("share", [0.0, 0.001])
def test_a_part_is_found_in_the_whole(share: float) -> None:
    second = program(8)
    part = second[2000:20_000]
    first, same = disturbed(part, share)
    found = align(first, second, free=Ends.BOTH)
    check(found, first, second)
    assert len(found.first) >= 0.999 * same
    assert abs(found.start - 2000) <= 3
    assert abs(found.stop - 20_000) <= 3


def test_of_equal_places_the_likeliest_is_taken_and_then_the_last() -> None:
    second = program(6)
    step = 32 * 150 + 3000
    first = second[5000 : 5000 + step]
    assert align(first, second, free=Ends.BOTH).start == 5000 + 5 * step
    cost = np.abs(np.arange(len(second)) - (5000 + 2 * step))
    assert align(first, second, free=Ends.BOTH, cost_of_start=cost).start == 5000 + 2 * step


def test_the_second_may_go_on() -> None:
    second = program(6)
    first = np.delete(second[:20_000], [7000, 12_345])
    found = align(first, second, free=Ends.TAIL)
    assert len(found.first) == len(first)
    assert found.stop == 20_000
    assert sorted(set(range(20_000)) - set(found.second.tolist())) == [7000, 12_345]


def test_a_stretch_too_long_for_edits_is_passed_over() -> None:
    chance = np.random.default_rng(3)
    second = chance.integers(0, 500, 30_000)
    first = np.concatenate([second[:9000], second[15_000:]])
    found = align(first, second)
    check(found, first, second)
    assert len(found.first) >= len(first) - 5


def test_a_part_of_very_many_equal_steps_lies_within_them() -> None:
    step = np.random.default_rng(4).integers(0, 50, 300)
    second = np.tile(step, 200)
    found = align(second[: 300 * 80], second, free=Ends.BOTH)
    assert len(found.first) == 300 * 80
    assert (found.start, found.stop) == (300 * 120, 300 * 200)


def test_a_part_that_differs_in_every_layer_begins_at_the_right_one() -> None:
    chance = np.random.default_rng(5)
    layer = chance.integers(0, 40, 100)
    second = np.concatenate([chance.integers(100, 200, 1000), np.tile(layer, 32), chance.integers(0, 99, 50)])
    whole = np.concatenate([layer[:60], [777], layer[60:]])
    first = np.concatenate([np.tile(whole, 32), second[-50:]])
    cost = np.abs(np.arange(len(second)) - 1000)
    found = align(first, second, free=Ends.BOTH, cost_of_start=cost)
    assert (found.start, found.stop) == (1000, len(second))
    assert len(found.first) == len(first) - 32
    assert set(np.delete(first, found.first).tolist()) == {777}
