"""The techniques of a plan, each with what removing it alone would change; those that nothing needs are taken out."""

from __future__ import annotations

from dataclasses import replace

from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.plan_builder import FittedCandidate
from vramfit.planner.plan_file import PlanStep
from vramfit.planner.plans import MEMORY
from vramfit.planner.search_clock import SearchStopped
from vramfit.techniques import Choice

_EQUAL = 1e-6
"""Part of a step's seconds by which two runs of the same operations may differ: their sums are rounded."""


def entries_of(
    candidates: Candidates, fitted: FittedCandidate
) -> tuple[FittedCandidate, tuple[PlanStep, ...]]:
    """A fitted candidate without the techniques that nothing needs, and its others with what each changes.

    Each is taken out by itself and the rest run within the budget, or without a limit where it no longer fits. What is
    no worse without it goes. Where there is no time for a run, its figures are left out.
    """
    if not candidates.request.entries or not fitted.cost.fits:
        return fitted, tuple(PlanStep(choice=choice) for choice in fitted.choices)
    entries: list[PlanStep] = []
    for choice in fitted.choices:
        rest = tuple(other for other in fitted.choices if other is not choice)
        cost = _cost(candidates, choice, rest, fitted)
        if cost is not None and _no_worse(cost, fitted.cost, least=candidates.request.objective == MEMORY):
            return entries_of(candidates, replace(fitted, choices=rest, cost=cost, recipe=""))
        entries.append(_entry(choice, cost, fitted.cost))
    return fitted, tuple(entries)


def _entry(choice: Choice, without: StepCost | None, planned: StepCost) -> PlanStep:
    if without is None:
        return PlanStep(choice=choice)
    return PlanStep(
        choice=choice,
        saves_bytes=without.total_bytes - planned.total_bytes,
        costs_seconds=planned.step_seconds - without.step_seconds,
    )


def _cost(
    candidates: Candidates, choice: Choice, rest: tuple[Choice, ...], fitted: FittedCandidate
) -> StepCost | None:
    """What a step takes without a technique; None where that does not run, or there is no time for it."""
    candidates.progress(f"without {choice.name}")
    try:
        with candidates.clock.aside():
            return candidates.cost_or_error(rest, fitted.scored.candidate.step.tail_seconds)
    except KeyboardInterrupt:
        candidates.clock.interrupt()
        return None
    except (Exception, SearchStopped):  # some do not run without others
        return None


def _no_worse(without: StepCost, planned: StepCost, *, least: bool) -> bool:
    """Whether the plan is no worse without a technique.

    Args:
        least: whether the lowest peak is asked for, rather than the quickest step.
    """
    if not without.fits:
        return False
    slack = _EQUAL * planned.step_seconds
    if least:
        return without.bytes_first <= replace(planned, step_seconds=planned.step_seconds + slack).bytes_first
    if without.step_seconds < planned.step_seconds - slack:
        return True
    as_quick = without.step_seconds <= planned.step_seconds + slack
    return as_quick and without.total_bytes <= planned.total_bytes
