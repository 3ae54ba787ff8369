"""Builds the plan that a user reads from what the search found, or the error that nothing fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vramfit.planner.budget_fit import FittedCandidate
from vramfit.planner.candidates import Candidate, Candidates, key_of
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.plans import Plan, PlanFigures, PlanStep, PlanTarget, SolverStats
from vramfit.planner.request import NothingFits
from vramfit.planner.search_clock import INTERRUPTED, TIME_OVER, SearchStopped
from vramfit.techniques import Choice
from vramfit.units import format_bytes

_HOW_STOPPED = {TIME_OVER: "had no more time", INTERRUPTED: "was interrupted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        fitted: the techniques that fit best, and their run.
        plain: the workload as it is.
        seconds: that the search took.
    """

    fitted: FittedCandidate
    plain: Candidate
    seconds: float


def build_plan(candidates: Candidates, result: SearchResult) -> Plan:
    """The plan.

    Raises:
        NothingFits: it does not stay within the budget.
    """
    request, plain, fitted = candidates.request, result.plain, result.fitted
    solution, cost = fitted.solution, fitted.cost
    before = PlanFigures(
        peak_allocated_bytes=plain.profile.peak_allocated_bytes,
        peak_reserved_bytes=plain.profile.peak_reserved_bytes,
        total_bytes=plain.profile.peak_reserved_bytes + plain.profile.outside_bytes,
        host_bytes=plain.profile.host_peak_bytes,
        step_seconds=plain.step.seconds,
        step_flops=plain.step.flops,
    )
    plan = Plan(
        entries=_entries(candidates, fitted, before),
        aim=PlanTarget(
            device=candidates.device.name,
            budget_bytes=request.budget_bytes,
            margin_bytes=request.margin_bytes,
            host_budget_bytes=request.host_bytes,
            numerics=request.numerics,
            objective=request.objective,
            sizes=dict(request.sizes),
            target=request.target,
            torch=str(torch.__version__),
        ),
        before=before,
        after=cost.figures,
        solved=SolverStats(
            status="nothing to choose" if solution is None else solution.status,
            gap=None if solution is None else solution.gap,
            seconds=candidates.solver_seconds,
            runs=candidates.runs,
            remembered=0 if candidates.cache is None else candidates.cache.used,
            search_seconds=result.seconds,
            first_plan_seconds=candidates.clock.first_plan,
            stopped=candidates.clock.stopped or None,
        ),
        notes=(*_stopped(candidates, result), *candidates.notes(fitted.choices)),
    )
    if not plan.fits:
        raise _nothing_yet(candidates, plan) if candidates.clock.stopped else _nothing_fits(plan, plain)
    return plan


def _stopped(candidates: Candidates, result: SearchResult) -> tuple[str, ...]:
    """That this is only the best so far, where it is."""
    how = _HOW_STOPPED.get(candidates.clock.stopped)
    if how is None:
        return ()
    return (
        f"The best so far: the search {how} after {result.seconds:.0f} s and {candidates.runs} runs; a longer one may "
        "find a quicker plan.",
    )


def _entries(candidates: Candidates, fitted: FittedCandidate, before: PlanFigures) -> tuple[PlanStep, ...]:
    """Each technique with what it changes beyond those before it."""
    choices = fitted.choices
    if not candidates.request.entries:
        return tuple(PlanStep(choice=choice) for choice in choices)
    entries = []
    total, seconds = before.total_bytes, before.step_seconds
    for count, choice in enumerate(choices, 1):
        after, step = _with_these(candidates, choices[:count], fitted) or (total, seconds)
        entries.append(PlanStep(choice=choice, saves_bytes=total - after, costs_seconds=step - seconds))
        total, seconds = after, step
    return tuple(entries)


def _with_these(
    candidates: Candidates, choices: tuple[Choice, ...], fitted: FittedCandidate
) -> tuple[int, float] | None:
    """Bytes of the device and seconds of a step, from a run that there was already where there was one.

    None where they cannot be run.
    """
    cost: StepCost = fitted.cost
    if choices != fitted.choices:
        if candidates.known(key_of(choices)) and (candidate := candidates.run(choices)) is not None:
            return (
                candidate.profile.peak_reserved_bytes + candidate.profile.outside_bytes,
                candidate.step.seconds,
            )
        candidates.progress(f"what {choices[-1].name} does")
        try:
            cost = candidates.cost_without_limit(choices, fitted.scored.candidate.step.tail_seconds)
        except (Exception, SearchStopped):  # some do not run without those that come after them
            return None
    return cost.total_bytes, cost.step_seconds


def _nothing_yet(candidates: Candidates, plan: Plan) -> NothingFits:
    """The search was stopped too early to say that there is none."""
    limit = format_bytes(plan.aim.budget_bytes - plan.aim.margin_bytes)
    return NothingFits(
        f"no plan for {limit} yet: the search {_HOW_STOPPED[candidates.clock.stopped]} after {candidates.runs} runs",
        "Call it again with more time (--search-seconds)",
        plan,
    )


def _nothing_fits(plan: Plan, plain: Candidate) -> NothingFits:
    aim = plan.aim
    allowed = aim.budget_bytes - aim.margin_bytes
    if plan.after.total_bytes <= allowed:
        needed, host = format_bytes(plan.after.host_bytes), format_bytes(aim.host_budget_bytes)
        return NothingFits(
            f"nothing fits: the closest plan takes {needed} of the host, and {host} may be spent there",
            "Give more with --host-budget, or forbid what is offloaded",
            plan,
        )
    parameters = sum(p.numel() * p.element_size() for p in plain.profile.model.parameters())
    lowest, limit = format_bytes(plan.after.total_bytes), format_bytes(allowed)
    if plain.profile.outside_bytes + parameters > allowed:
        binds = f"the parameters alone take {format_bytes(parameters)}"
        hint = (
            "Allow parameter-offload or lower precision, take a larger card, or shard the model over several"
        )
    else:
        binds = (
            f"{format_bytes(plan.after.peak_allocated_bytes)} are held at the peak with all that may be used"
        )
        hint = "Allow more (--numerics, --allow), make the batch smaller, or take a larger card"
    return NothingFits(f"nothing fits {limit}: the lowest that was found is {lowest}; {binds}", hint, plan)
