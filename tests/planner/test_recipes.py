"""What people try by hand, as part of a search: run early, never beaten, and told with what speaks against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.test_search import CONTEXT, GPU, MIB, workload
from tests.planner.test_search_clock import Second, Timed

from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.cost import StepCost, step_cost_with
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.hand_recipes import EXPANDABLE
from vramfit.planner.plan_builder import FittedCandidate, build_plan, fit_to_budget
from vramfit.planner.plan_entries import entries_of
from vramfit.planner.plan_file import OtherWay
from vramfit.planner.plans import MEMORY, Plan, PlanRequest
from vramfit.planner.recipe_runs import RecipeRuns
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_clock import SearchClock
from vramfit.report import json_text, render
from vramfit.techniques import Choice, Numerics, find_technique, setting_from_plain
from vramfit.workload import Workload

ASKED = workload(256, 1 << 16)
BUDGET = CONTEXT + 800 * MIB


def choice(name: str, **setting: object) -> Choice:
    technique = find_technique(name)
    return Choice(technique=technique, setting=setting_from_plain(technique, setting))


FULL = choice("activation-checkpointing", mode="whole")
SECOND = choice("activation-checkpointing", mode="every")
SELECTIVE = choice("activation-checkpointing", mode="selective", save={"*": ["expensive"]})
TWO, FOUR = (choice("micro-batching", count=count, reduction="mean") for count in (2, 4))
AUTOCAST = choice("mixed-precision")
BY_HAND = [
    (FULL,),
    (SECOND,),
    (SELECTIVE,),
    (TWO,),
    (FOUR,),
    *((one, cut) for one in (FULL, SECOND, SELECTIVE) for cut in (TWO, FOUR)),
]


def request(**other: Any) -> PlanRequest:
    given: dict[str, Any] = {
        "allowed": frozenset({"activation-checkpointing", "micro-batching", "mixed-precision"}),
        "budget_bytes": BUDGET,
        "host_bytes": 1 << 34,
        "entries": False,
    }
    return PlanRequest(workload=ASKED, sizes=ASKED.sizes, **(given | other))


def by_hand(choices: tuple[Choice, ...], budget: int = BUDGET) -> StepCost:
    return step_cost_with(device(), ASKED, choices, ASKED.sizes, budget)


def device() -> VirtualBackend:
    return VirtualBackend(GPU, alloc_conf="", host_bytes=1 << 34)


@pytest.fixture(scope="module")
def without_search() -> Iterator[Plan]:
    """The plan of a search that finds nothing by itself, on a card that takes a second for each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanSearch, "_climb", lambda self: self._scored(self.candidates.plain))
        patch.setattr("vramfit.planner.search.fit_to_budget", _nothing_fits)
        second = Second()
        candidates = Candidates(
            device=Timed(second), request=request(entries=True), clock=SearchClock(now=second)
        )
        yield PlanSearch(candidates).plan()


def _nothing_fits(candidates: Candidates, scored: Any, **_: object) -> FittedCandidate:
    return FittedCandidate(scored=scored, choices=(), solution=None, cost=candidates.unknown_cost())


def test_a_plan_that_fits_is_there_after_three_runs(without_search: Plan) -> None:
    assert without_search.solved.first_plan_seconds is not None
    assert without_search.solved.first_plan_seconds <= 3


def test_the_end_is_never_worse_than_the_best_by_hand(without_search: Plan) -> None:
    costs = [cost for cost in map(by_hand, BY_HAND) if cost.fits]
    assert len(costs) >= 5
    assert without_search.after.step_seconds == min(cost.step_seconds for cost in costs)
    assert without_search.solved.status == "the recipe of two micro-batches"


def test_each_recipe_is_told_with_its_figures_and_why_it_is_not_the_plan(without_search: Plan) -> None:
    told = {way.name: way for way in without_search.rejected}
    full, second = told["full checkpointing"], told["checkpointing of every second block"]
    cost = by_hand((FULL,))
    assert full == OtherWay(
        name="full checkpointing",
        why=f"{cost.step_seconds / without_search.after.step_seconds - 1:.1%} slower than the plan",
        numerics=Numerics.BITWISE,
        total_bytes=cost.total_bytes,
        step_seconds=cost.step_seconds,
        fits=True,
    )
    assert not second.fits
    endless = step_cost_with(device(), ASKED, (SECOND,), ASKED.sizes, None)
    assert second.total_bytes == endless.total_bytes > BUDGET
    assert second.why.startswith("does not fit: ")
    assert (
        told["full checkpointing with two micro-batches"].why
        == "not run: full checkpointing fits without more"
    )
    assert told["four micro-batches"].fits


def test_what_more_freedom_would_give_is_told_apart(without_search: Plan) -> None:
    assert "autocast" not in {way.name for way in without_search.rejected}
    autocast = next(way for way in without_search.freedom if way.name == "autocast")
    cost = step_cost_with(device(), ASKED, (AUTOCAST,), ASKED.sizes, None)
    assert (autocast.total_bytes, autocast.step_seconds) == (cost.total_bytes, cost.step_seconds)
    assert autocast.numerics is Numerics.PRECISION
    assert autocast.why.endswith("needs --numerics precision, and rounding is allowed")
    assert without_search.numerics <= Numerics.ROUNDING


def test_reports_tell_what_was_rejected(without_search: Plan) -> None:
    lines = render(without_search, width=140)
    assert "tried, and not the plan" in lines
    assert "full checkpointing" in lines
    assert "with more freedom" in lines
    document = json.loads(json_text(without_search))
    assert document["schema"] == "vramfit.plan/2"
    names = [way["name"] for way in document["rejected"]]
    assert names == [way.name for way in without_search.rejected]
    assert document["freedom"][0]["numerics"] == "precision"


def test_recipes_stay_within_what_is_allowed() -> None:
    asked = request(numerics=Numerics.BITWISE, allowed=frozenset({"activation-checkpointing"}))
    search = PlanSearch(Candidates(device=device(), request=asked))
    search._recipes.run()
    assert {run.recipe.name for run in search._recipes.done} == {
        "full checkpointing",
        "checkpointing of every second block",
        "selective checkpointing",
    }
    # Nothing has to be changed where the program fits as it is.
    ample = PlanSearch(Candidates(device=device(), request=replace(asked, budget_bytes=CONTEXT + 8192 * MIB)))
    ample._recipes.run()
    assert not ample._recipes.done


def test_the_lowest_peak_is_no_higher_than_that_of_a_recipe() -> None:
    asked = request(objective=MEMORY, allowed=frozenset({"activation-checkpointing"}))
    plan = PlanSearch(Candidates(device=device(), request=asked)).plan()
    assert plan.after.total_bytes <= by_hand((FULL,)).total_bytes


# -- what each technique changes -------------------------------------------------------------------------------------


def _fitted(candidates: Candidates, *choices: Choice) -> FittedCandidate:
    scored = candidates.score(candidates.plain)
    return FittedCandidate(scored=scored, choices=choices, solution=None, cost=candidates.cost(choices, 0.0))


def test_figures_of_a_technique_are_what_removing_it_alone_would_change() -> None:
    alone = step_cost_with(device(), ASKED, (TWO,), ASKED.sizes, None)
    tight = request(entries=True, budget_bytes=CONTEXT + alone.peak_allocated_bytes - 1)
    candidates = Candidates(device=device(), request=tight)
    both = _fitted(candidates, SECOND, TWO)
    assert both.cost.fits
    kept, entries = entries_of(candidates, both)
    assert kept is both
    for entry, rest in zip(entries, (TWO, SECOND), strict=True):
        without = step_cost_with(device(), ASKED, (rest,), ASKED.sizes, None)
        assert entry.saves_bytes == without.total_bytes - both.cost.total_bytes > 0
        assert entry.costs_seconds == both.cost.step_seconds - without.step_seconds


def test_a_technique_that_nothing_needs_is_no_part_of_the_plan() -> None:
    candidates = Candidates(device=device(), request=request(entries=True))
    idle = choice("allocator-settings", conf="max_split_size_mb:4096")
    kept, entries = entries_of(candidates, _fitted(candidates, idle, FULL))
    assert [entry.choice for entry in entries] == [FULL] == list(kept.choices)
    assert entries[0].saves_bytes and entries[0].costs_seconds
    # Where one is enough by itself, the other only costs time.
    kept, entries = entries_of(candidates, _fitted(candidates, TWO, FULL))
    assert [entry.choice for entry in entries] == [FULL] == list(kept.choices)


# -- caches that are emptied -----------------------------------------------------------------------------------------


class Retrying(VirtualBackend):
    """A card on which plans that take more than so much only fit by emptying caches."""

    above = CONTEXT + 720 * MIB

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        cost = super().step_cost(workload, sizes, budget)
        if not cost.fits or cost.total_bytes <= self.above:
            return cost
        return replace(cost, retries=2, retry_seconds=0.5, step_seconds=cost.step_seconds + 0.5)


def test_a_plan_with_emptied_caches_gives_way_to_one_without() -> None:
    asked = request(allowed=frozenset({"activation-checkpointing"}), recipes=False)
    tight = Retrying(GPU, alloc_conf="", host_bytes=1 << 34)
    candidates = Candidates(device=tight, request=asked)
    found = fit_to_budget(candidates, candidates.score(candidates.plain))
    assert found.cost.fits
    assert found.cost.retries == 0
    assert found.cost.total_bytes <= Retrying.above


def test_a_plan_with_emptied_caches_says_so() -> None:
    candidates = Candidates(device=device(), request=request())
    fitted = _fitted(candidates, FULL)
    cost = replace(fitted.cost, retries=2, retry_seconds=0.02)
    plan = build_plan(candidates, replace(fitted, cost=cost), 1.0)
    assert plan.notes[0].startswith(
        "The budget is so tight that torch's allocator empties its cache 2 times in each"
    )
    lines = render(plan, width=140)
    assert "the allocator empties its cache 2 times, which takes 20 ms (estimated)" in lines
    assert (plan.after.retries, plan.after.retry_seconds) == (2, 0.02)


def test_no_recipe_sets_the_allocator_twice() -> None:
    """Caches that are emptied in spite of expandable segments are no reason to ask for these again."""
    asked = request(allowed=frozenset({"activation-checkpointing", "allocator-settings"}))
    tight = Retrying(GPU, alloc_conf="", host_bytes=1 << 34)
    tight.above = 0
    recipes = RecipeRuns(Candidates(device=tight, request=asked), keep=lambda _recipe, _cost: None)
    recipes.run()
    names = [run.recipe.name for run in recipes.done]
    assert any(name.endswith(f" with {EXPANDABLE}") for name in names)
    assert not any(name.count(EXPANDABLE) > 1 for name in names)
