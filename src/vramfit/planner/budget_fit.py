"""Fits a candidate's plan to the budget: it is applied and run, and the program's budget moved until the run fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramfit.planner.activation_ilp.choices import activation_choices
from vramfit.planner.activation_ilp.decisions import IlpSolution
from vramfit.planner.candidates import Candidates, ScoredCandidate
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.request import MEMORY
from vramfit.techniques import Choice

_TRIES = 10
"""Runs with which a solution is brought within the budget."""

_CLOSE = 0.01
"""A part of the budget that is worth another run to make use of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCandidate:
    """A plan's techniques as they were run.

    Attributes:
        scored: the candidate that they come from.
        choices: with those for activations.
        solution: of the program; None without one.
        cost: of the run.
    """

    scored: ScoredCandidate
    choices: tuple[Choice, ...]
    solution: IlpSolution | None
    cost: StepCost


def fit_to_budget(
    candidates: Candidates,
    scored: ScoredCandidate,
    *,
    seen: Callable[[FittedCandidate], bool] = lambda _: False,
    tries: int = _TRIES,
    quick: bool = False,
) -> FittedCandidate:
    """The quickest plan of a candidate whose run stays within the budget, or the one that came closest.

    Args:
        candidates: what was run so far.
        scored: the candidate.
        seen: called with each run; returns whether it is good enough.
        tries: how many runs, at most.
        quick: whether the first solution is good enough, and the best need not be looked for.

    Raises:
        SearchStopped: the time was over; `seen` was called with what was run.
    """
    candidate, limit = scored.candidate, candidates.request.limit
    least = candidates.request.objective == MEMORY
    low = candidates.lowest(candidate)
    target = low if least or scored.solution is None else limit - candidates.outside(candidate)
    tail = candidate.step.tail_seconds
    fitting: FittedCandidate | None = None
    closest: FittedCandidate | None = None
    failed_at: int | None = None
    for _ in range(tries):
        solution = candidates.solve(candidate, target, quick=quick)
        if solution is None:
            if target >= low:
                break
            target = low
            continue
        choices = (*candidate.choices, *activation_choices(candidate.step, solution.decisions))
        candidates.progress("a run with the plan")
        cost = candidates.cost(choices, tail)
        tried = FittedCandidate(scored=scored, choices=choices, solution=solution, cost=cost)
        if seen(tried):
            return tried
        if not cost.fits:
            if closest is None or cost.total_bytes < closest.cost.total_bytes:
                closest = tried
            if fitting is not None or target <= low:
                break
            failed_at = target
            over = max(cost.total_bytes - limit, round(0.002 * limit))
            target = max(low, target - over)
            continue
        if fitting is None or cost.step_seconds <= fitting.cost.step_seconds:
            fitting = tried
        headroom = limit - cost.total_bytes
        if not solution.decisions or headroom < _CLOSE * limit or least:
            break
        following = target + headroom * 3 // 4
        if failed_at is not None:
            following = min(following, (target + failed_at) // 2)
        if following - target < _CLOSE * limit / 4:
            break
        target = following
    if fitting is not None:
        return fitting
    if closest is None:
        cost = candidates.cost(candidate.choices, tail)
        closest = FittedCandidate(scored=scored, choices=candidate.choices, solution=None, cost=cost)
        seen(closest)
    return closest


def not_run(candidates: Candidates, scored: ScoredCandidate) -> FittedCandidate:
    """A candidate of which no plan was run: nothing is known to fit."""
    return FittedCandidate(
        scored=scored, choices=scored.candidate.choices, solution=None, cost=candidates.unknown_cost()
    )
