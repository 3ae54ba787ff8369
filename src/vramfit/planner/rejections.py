"""What a plan was compared with, and why it is not the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vramfit.planner.candidates import Candidates, ScoredCandidate, key_of
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.plan_builder import FittedCandidate
from vramfit.planner.plan_file import OtherWay
from vramfit.planner.plans import MEMORY
from vramfit.planner.recipe_runs import RecipeRun
from vramfit.techniques import Choice, Numerics
from vramfit.units import counted, format_bytes


def rejected_ways(
    candidates: Candidates,
    chosen: FittedCandidate,
    recipes: Sequence[RecipeRun],
    fitted: Iterable[FittedCandidate],
    scored: Iterable[ScoredCandidate],
) -> tuple[OtherWay, ...]:
    """What was tried and is not the plan: those that fit first, the quickest first; then the lowest first.

    Args:
        chosen: the plan.
        recipes: those that were run or left out, without those beyond what is allowed.
        fitted: plans that were run.
        scored: combinations that were profiled, of which no plan need have been run.
    """
    told = {key_of(chosen.choices)}
    ways: list[OtherWay] = []
    for run in recipes:
        if (key := key_of(run.recipe.choices)) not in told:
            told.add(key)
            ways.append(_of_recipe(candidates, run, chosen))
    for one in fitted:
        if (key := key_of(one.choices)) not in told:
            told.add(key)
            why = _why_not(candidates, one.cost, chosen.cost)
            ways.append(_of_run(_words(one.choices), one.choices, one.cost, why))
    for guess in scored:
        if (key := key_of(guess.candidate.choices)) not in told:
            told.add(key)
            ways.append(_predicted(candidates, guess, chosen))
    return tuple(sorted(ways, key=lambda way: (not way.total_bytes, not way.fits, *_rank(way))))


def beyond_ways(
    candidates: Candidates, chosen: FittedCandidate, recipes: Iterable[RecipeRun]
) -> tuple[OtherWay, ...]:
    """Recipes that change results more than is allowed, with what each would take."""
    ways = []
    for run in recipes:
        if run.cost is None:
            continue
        allowed = candidates.request.numerics.value
        why = f"needs --numerics {run.recipe.numerics.value}, and {allowed} is allowed"
        worse = _why_not(candidates, run.cost, chosen.cost)
        if chosen.cost.fits and worse and not _better(candidates, run.cost, chosen.cost):
            why = f"{worse}; {why}"
        ways.append(_of_run(run.recipe.name, run.recipe.choices, run.cost, why))
    return tuple(sorted(ways, key=lambda way: (not way.fits, *_rank(way))))


def _rank(way: OtherWay) -> tuple[float, float]:
    time, total = way.step_seconds, float(way.total_bytes)
    return (time, total) if way.fits else (total, time)


def _better(candidates: Candidates, cost: StepCost, than: StepCost) -> bool:
    if not cost.fits:
        return False
    if candidates.request.objective == MEMORY:
        return cost.bytes_first < than.bytes_first
    return cost.step_seconds < than.step_seconds


def _of_recipe(candidates: Candidates, run: RecipeRun, chosen: FittedCandidate) -> OtherWay:
    recipe = run.recipe
    if run.cost is None:
        return OtherWay(name=recipe.name, numerics=recipe.numerics, why=run.why)
    return _of_run(recipe.name, recipe.choices, run.cost, _why_not(candidates, run.cost, chosen.cost))


def _of_run(name: str, choices: Iterable[Choice], cost: StepCost, why: str) -> OtherWay:
    return OtherWay(
        name=name,
        why=why,
        numerics=_numerics(choices),
        total_bytes=cost.total_bytes,
        step_seconds=cost.step_seconds,
        fits=cost.fits,
    )


def _predicted(candidates: Candidates, scored: ScoredCandidate, chosen: FittedCandidate) -> OtherWay:
    choices, fits = scored.candidate.choices, scored.solution is not None
    if fits:
        why = _than("predicted", scored.seconds, chosen.cost.step_seconds)
    else:
        why = _too_much(candidates, scored.lowest, "at the lowest, as predicted")
    return OtherWay(
        name=_words(choices),
        why=why,
        numerics=_numerics(choices),
        total_bytes=scored.lowest,
        step_seconds=scored.seconds,
        fits=fits,
        predicted=True,
    )


def _why_not(candidates: Candidates, cost: StepCost, chosen: StepCost) -> str:
    if not cost.fits:
        if cost.total_bytes <= candidates.request.limit:
            return "takes too much of the host"
        return _too_much(candidates, cost.total_bytes, "")
    if candidates.request.objective == MEMORY:
        return f"takes {format_bytes(max(0, cost.total_bytes - chosen.total_bytes))} more"
    retries = f", with {counted(cost.retries, 'emptied cache')} in each step" if cost.retries else ""
    return _than("", cost.step_seconds, chosen.step_seconds) + retries


def _too_much(candidates: Candidates, total: int, how: str) -> str:
    over = format_bytes(max(0, total - candidates.request.limit))
    return f"does not fit: {over} too much{', ' * bool(how)}{how}"


def _than(how: str, seconds: float, planned: float) -> str:
    """How long a step takes beside the plan's."""
    if not planned:
        return how
    change = seconds / planned - 1
    if abs(change) < 0.0005:
        words = "as quick as the plan, which takes fewer bytes or techniques"
    else:
        words = f"{abs(change):.1%} {'slower' if change > 0 else 'quicker'} than the plan"
    return f"{how}: {words}" if how else words


def _words(choices: Iterable[Choice]) -> str:
    return ", ".join(choice.words for choice in choices) or "the program as it is"


def _numerics(choices: Iterable[Choice]) -> Numerics:
    return max((choice.promise.numerics for choice in choices), default=Numerics.BITWISE)
