"""Brings a frame's plan within the budget in truth: applied and run, with the program's budget moved until it fits."""

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
        rated: the frame that they come from.
        choices: with those for activations.
        solution: of the program; None without one.
        price: of the run.
    """

    rated: ScoredCandidate
    choices: tuple[Choice, ...]
    solution: IlpSolution | None
    price: StepCost


def fit_to_budget(
    frames: Candidates,
    rated: ScoredCandidate,
    *,
    seen: Callable[[FittedCandidate], bool] = lambda _: False,
    tries: int = _TRIES,
    quick: bool = False,
) -> FittedCandidate:
    """The quickest plan of a frame whose run stays within the budget, or the one that came closest.

    Args:
        frames: what was run so far.
        rated: the frame.
        seen: told of each run; whether that one is good enough.
        tries: how many runs, at most.
        quick: whether the first solution is good enough, and the best need not be looked for.

    Raises:
        SearchStopped: the time was over; what was run was told.
    """
    frame, limit = rated.frame, frames.request.limit
    least = frames.request.objective == MEMORY
    low = frames.lowest(frame)
    target = low if least or rated.solution is None else limit - frames.outside(frame)
    tail = frame.observation.tail_seconds
    fitting: FittedCandidate | None = None
    closest: FittedCandidate | None = None
    failed_at: int | None = None
    for _ in range(tries):
        solution = frames.solve(frame, target, quick=quick)
        if solution is None:
            if target >= low:
                break
            target = low
            continue
        choices = (*frame.choices, *activation_choices(frame.observation, solution.decisions))
        frames.progress("a run with the plan")
        price = frames.price(choices, tail)
        tried = FittedCandidate(rated=rated, choices=choices, solution=solution, price=price)
        if seen(tried):
            return tried
        if not price.fits:
            if closest is None or price.total_bytes < closest.price.total_bytes:
                closest = tried
            if fitting is not None or target <= low:
                break
            failed_at = target
            over = max(price.total_bytes - limit, round(0.002 * limit))
            target = max(low, target - over)
            continue
        if fitting is None or price.step_seconds <= fitting.price.step_seconds:
            fitting = tried
        room = limit - price.total_bytes
        if not solution.decisions or room < _CLOSE * limit or least:
            break
        following = target + room * 3 // 4
        if failed_at is not None:
            following = min(following, (target + failed_at) // 2)
        if following - target < _CLOSE * limit / 4:
            break
        target = following
    if fitting is not None:
        return fitting
    if closest is None:
        price = frames.price(frame.choices, tail)
        closest = FittedCandidate(rated=rated, choices=frame.choices, solution=None, price=price)
        seen(closest)
    return closest


def unsettled(frames: Candidates, rated: ScoredCandidate) -> FittedCandidate:
    """A frame of which no plan was run: nothing is known to fit."""
    return FittedCandidate(
        rated=rated, choices=rated.frame.choices, solution=None, price=frames.unknown_price()
    )
