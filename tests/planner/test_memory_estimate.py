"""Guesses at combinations, on estimates made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vramfit.planner.memory_estimate import Effect, MemoryEstimate, Part, Parts, guesses

PLAIN = MemoryEstimate(
    weights=25.0,
    states=50.0,
    gradients=25.0,
    kept=8.0,
    reduced=1.0,
    tail=25.0,
    setup=25.0,
    outside=1.0,
    passes=2.0,
    stepping=1.0,
    recomputing=0.5,
)
HALVES: Part = ("half-precision", "")
OFFLOAD: Part = ("optimizer-offload", "")
PIECES: Part = ("micro-batching", "4")
EFFECTS = {
    HALVES: Effect(
        PLAIN, replace(PLAIN, weights=12.5, states=25.0, gradients=12.5, kept=4.0, tail=12.5, setup=12.5)
    ),
    OFFLOAD: Effect(PLAIN, replace(PLAIN, states=0.0, gradients=0.0, tail=0.0, stepping=3.0)),
    PIECES: Effect(PLAIN, replace(PLAIN, kept=2.0, reduced=0.5, passes=2.2)),
}


def _within(limit: float) -> Callable[[MemoryEstimate], tuple[float, float]]:
    def score(estimate: MemoryEstimate) -> tuple[float, float]:
        if estimate.lowest > limit:
            return (1.0, estimate.lowest)
        return (0.0, estimate.seconds_within(limit))

    return score


def _best(limit: float, seen: dict[Parts, MemoryEstimate] | None = None) -> Parts:
    found = guesses(seen or {frozenset(): PLAIN}, EFFECTS, lambda _: True, _within(limit))
    return next(iter(found)).parts


def test_the_parts_make_the_peak() -> None:
    assert PLAIN.lowest == 25 + 50 + 25 + 25 + 1
    offloaded = EFFECTS[OFFLOAD].after
    assert (offloaded.lowest, offloaded.highest) == (27.0, 34.0)
    assert offloaded.seconds_within(34.0) == 5.0
    assert offloaded.seconds_within(30.5) == 5.25
    assert offloaded.seconds_within(1.0) == 5.5


def test_techniques_that_help_only_together_are_found() -> None:
    # Neither fits 20 by itself.
    assert all(effect.after.lowest > 20 for effect in EFFECTS.values())
    assert _best(20.0) == {HALVES, OFFLOAD}


def test_more_techniques_than_needed_are_no_better() -> None:
    assert _best(200.0) == {HALVES}  # of equal guesses the shortest, the plain program itself being no guess
    assert _best(40.0) == {OFFLOAD}


def test_what_was_run_counts_in_place_of_what_was_guessed() -> None:
    worse = replace(PLAIN, weights=18.0, states=0.0, gradients=0.0, tail=0.0)
    seen = {frozenset(): PLAIN, frozenset({HALVES, OFFLOAD}): worse}
    found = list(guesses(seen, EFFECTS, lambda _: True, _within(20.0)))
    together = next(guess for guess in found if guess.parts == {HALVES, OFFLOAD, PIECES})
    assert together.estimate.weights == 18.0
    assert together.estimate.passes == 2.2


def test_what_lies_there_before_the_first_step_is_not_guessed_from_single_techniques() -> None:
    waiting = Effect(
        PLAIN, replace(EFFECTS[HALVES].after, setup=25.0)
    )  # what bfloat16 loses waits on the device
    found = list(guesses({frozenset(): PLAIN}, EFFECTS | {HALVES: waiting}, lambda _: True, _within(20.0)))
    assert found[0].parts == {HALVES, OFFLOAD}
    assert found[0].estimate.setup == 12.5


def test_nothing_impossible_is_guessed() -> None:
    def possible(parts: Parts) -> bool:
        return not {HALVES, OFFLOAD} <= parts

    found = guesses({frozenset(): PLAIN}, EFFECTS, possible, _within(20.0))
    assert all(possible(guess.parts) for guess in found)


def test_parts_change_by_factors_and_new_ones_by_amounts() -> None:
    before = replace(PLAIN, reduced=0.0)
    effect = Effect(before, replace(before, weights=12.5, kept=9.0, reduced=2.0))
    found = effect.on(replace(PLAIN, weights=10.0, kept=2.0, reduced=1.0))
    assert (found.weights, found.kept, found.reduced) == (5.0, 2.25, 3.0)


def test_a_step_during_the_backward_pass_is_no_less_work() -> None:
    during = Effect(PLAIN, replace(PLAIN, gradients=0.0, passes=2.9, stepping=0.0))
    on_host = replace(PLAIN, passes=2.0, stepping=20.0)
    assert during.on(on_host).seconds == 2.0 + 20.0 * 0.9


def test_a_combination_with_something_of_unknown_effect_is_no_basis_for_what_lacks_the_rest() -> None:
    unknown: Part = ("chunked-loss", "17 rows")
    seen = {
        frozenset(): PLAIN,
        frozenset({unknown}): PLAIN,
        frozenset({HALVES, OFFLOAD}): EFFECTS[HALVES].on(EFFECTS[OFFLOAD].after),
    }
    found = {guess.parts for guess in guesses(seen, EFFECTS, lambda _: True, _within(20))}
    assert frozenset({unknown, HALVES, OFFLOAD}) in found
