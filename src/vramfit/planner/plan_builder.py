"""From a candidate to a plan: fitted to the budget by runs on the device, or the error that nothing fits.

A candidate's decisions are applied and run, and the budget of the program is moved until the run fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vramfit.planner.activation_ilp.decisions import IlpSolution, activation_choices
from vramfit.planner.candidates import Candidate, Candidates, ScoredCandidate
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.plan_file import OtherWay, PlanFigures, PlanStep, PlanTarget, SolverStats
from vramfit.planner.plans import MEMORY, NothingFits, Plan
from vramfit.planner.search_clock import INTERRUPTED, TIME_OVER
from vramfit.techniques import Choice, find_technique
from vramfit.units import counted, format_bytes

_TRIES = 10
"""Runs with which a solution is brought within the budget."""

_CLOSE = 0.01
"""A part of the budget that is worth another run to make use of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCandidate:
    """A plan's techniques as they were run.

    Attributes:
        choices: with those for activations.
        solution: of the program; None without one.
        recipe: its name, where people would do the same by hand; else empty.
    """

    scored: ScoredCandidate
    choices: tuple[Choice, ...]
    solution: IlpSolution | None
    cost: StepCost
    recipe: str = ""


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
        seen: called with each run; returns whether it is good enough.
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
    less = round(_CLOSE * limit)
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
        if cost.retries and target > low:  # a little less may do without them
            failed_at, target, less = target, max(low, target - less), 2 * less
            continue
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


_HOW_STOPPED = {TIME_OVER: "had no more time", INTERRUPTED: "was interrupted"}


def build_plan(
    candidates: Candidates,
    fitted: FittedCandidate,
    seconds: float,
    *,
    entries: tuple[PlanStep, ...] | None = None,
    rejected: tuple[OtherWay, ...] = (),
    freedom: tuple[OtherWay, ...] = (),
) -> Plan:
    """The plan of the techniques that fit best, found by a search of so many seconds.

    Args:
        entries: its techniques with what each changes; None for what is not known.
        rejected: what else was tried.
        freedom: recipes beyond what is allowed.

    Raises:
        NothingFits: it does not stay within the budget.
    """
    plain, solution, cost = candidates.plain, fitted.solution, fitted.cost
    before = _plain_figures(plain)
    plan = Plan(
        entries=tuple(PlanStep(choice=choice) for choice in fitted.choices) if entries is None else entries,
        aim=replace(_target(candidates), torch=str(torch.__version__)),
        before=before,
        after=cost.figures,
        solved=SolverStats(
            status=_status(fitted),
            gap=None if solution is None else solution.gap,
            seconds=candidates.solver_seconds,
            runs=candidates.runs,
            remembered=0 if candidates.cache is None else candidates.cache.used,
            search_seconds=seconds,
            first_plan_seconds=candidates.clock.first_plan,
            stopped=candidates.clock.stopped or None,
        ),
        notes=(*_stopped(candidates, seconds), *_retries(cost), *candidates.notes(fitted.choices)),
        rejected=rejected,
        freedom=freedom,
    )
    if not plan.fits:
        raise _nothing_yet(candidates, plan) if candidates.clock.stopped else _nothing_fits(plan, plain)
    return plan


def _status(fitted: FittedCandidate) -> str:
    """How the decisions were found."""
    if fitted.recipe:
        return f"the recipe of {fitted.recipe}"
    return "nothing to choose" if fitted.solution is None else fitted.solution.status


def _plain_figures(plain: Candidate) -> PlanFigures:
    """What a step of the plain program needs."""
    return PlanFigures(
        peak_allocated_bytes=plain.profile.peak_allocated_bytes,
        peak_reserved_bytes=plain.profile.peak_reserved_bytes,
        total_bytes=plain.profile.peak_reserved_bytes + plain.profile.outside_bytes,
        host_bytes=plain.profile.host_peak_bytes,
        step_seconds=plain.step.seconds,
        step_flops=plain.step.flops,
    )


def _target(candidates: Candidates) -> PlanTarget:
    """What a plan is made for, without torch's version."""
    request = candidates.request
    return PlanTarget(
        device=candidates.device.name,
        budget_bytes=request.budget_bytes,
        margin_bytes=request.margin_bytes,
        host_budget_bytes=request.host_bytes,
        numerics=request.numerics,
        objective=request.objective,
        sizes=dict(request.sizes),
        target=request.target,
    )


def _stopped(candidates: Candidates, seconds: float) -> tuple[str, ...]:
    """That this is only the best so far, where it is."""
    how = _HOW_STOPPED.get(candidates.clock.stopped)
    if how is None:
        return ()
    return (
        f"The best so far: the search {how} after {seconds:.0f} s and {candidates.runs} runs; a longer one may "
        "find a quicker plan.",
    )


def _retries(cost: StepCost) -> tuple[str, ...]:
    """That the plan fits only because caches are emptied, where it does."""
    if not cost.retries:
        return ()
    return (
        f"The budget is so tight that torch's allocator empties its cache {counted(cost.retries, 'time')} in each step "
        f"and asks the driver anew: {1e3 * cost.retry_seconds:.3g} ms of a step, by estimate. Fragmentation beyond "
        "what was simulated would end the training: a few hundred MiB more are safer.",
    )


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


_LIGHTER = (
    *("parameter-offload", "low-precision-training", "parameter-sharing"),
    *("half-inference", "weight-quantization", "tensor-sharing"),
)
"""Techniques with which parameters take less of the device."""


def check_budget(candidates: Candidates) -> None:
    """Make sure that the budget has room for what every plan of this request takes.

    Raises:
        NothingFits: it has none; the plan is that without techniques.
    """
    request, plain = candidates.request, candidates.plain
    context = plain.profile.outside_bytes
    parameters = sum(one.numel() * one.element_size() for one in plain.profile.model.parameters())
    lighter = any(
        request.may(technique) and technique.numerics <= request.numerics
        for technique in map(find_technique, _LIGHTER)
    )
    limit = format_bytes(request.limit)
    if context >= request.limit:
        message = f"nothing fits {limit}: the CUDA context alone takes {format_bytes(context)}"
        hint = "Give a larger budget: the context counts"
    elif not lighter and context + parameters > request.limit:
        beside = f", and the CUDA context {format_bytes(context)}" if context else ""
        message = f"nothing fits {limit}: the parameters alone take {format_bytes(parameters)}{beside}"
        hint = (
            "Allow parameter-offload or lower precision, take a larger card, or shard the model over several"
        )
    else:
        return
    figures = _plain_figures(plain)
    plan = Plan(entries=(), aim=_target(candidates), before=figures, after=figures)
    raise NothingFits(message, hint, plan)
