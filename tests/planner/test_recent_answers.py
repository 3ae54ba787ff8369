"""Answers about step profiles are worked out once, for each step profile by itself."""

from __future__ import annotations

from vramfit.planner.activation_ilp import decisions
from vramfit.planner.activation_ilp.decisions import remembered


def test_answers_are_those_of_an_observation_and_of_what_else_is_asked() -> None:
    asked: list[tuple[int, int, bool]] = []

    @remembered
    def answer(step_profile: list[int], other: int, *, twice: bool = False) -> int:
        asked.append((len(step_profile), other, twice))
        return other * (2 if twice else 1)

    first, equal = [1], [1]
    assert [answer(first, 2), answer(first, 2), answer(first, 2, twice=True), answer(equal, 2)] == [
        2,
        2,
        4,
        2,
    ]
    assert asked == [(1, 2, False), (1, 2, True), (1, 2, False)], (
        "another one is asked about, though it is equal"
    )


def test_the_answers_asked_for_last_stay() -> None:
    asked: list[int] = []

    @remembered
    def answer(step_profile: list[int]) -> int:
        asked.append(step_profile[0])
        return step_profile[0]

    kept = [-1]
    for number in range(2 * decisions.KEPT):
        assert (answer([number]), answer(kept)) == (number, -1)
    assert asked.count(-1) == 1 and len(asked) == 2 * decisions.KEPT + 1
