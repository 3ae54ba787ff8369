"""Runs recipes that people try by hand before a search goes on, so that its end is never worse than the best of them.

NOTE [Which recipes are run]: the one with the least expected peak first, so that there is a plan early on; then all
others, those that cut the batch last, since whether it may be cut has to be tried. Those that cannot be quicker are
left out: where the program fits as it is, recipes that only save memory, and a pair of
two such recipes of which one fits by itself. What fits but for fragmentation is run with expandable segments, too.
Recipes that change results more than is allowed are run after the search, where time is left: to be named as what more
freedom would give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.hand_recipes import (
    ALLOCATOR,
    MICRO_BATCHING,
    HandRecipe,
    expandable_segments,
    expected_bytes,
    pairs_of,
    single_recipes,
)
from vramfit.planner.plans import MEMORY
from vramfit.planner.workload_check import brief
from vramfit.techniques import Choice, find_technique

KeepRun = Callable[[HandRecipe, StepCost], None]


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """What came of a recipe.

    Attributes:
        cost: of a run; None where there was none.
        why: why there was none, in words.
    """

    recipe: HandRecipe
    cost: StepCost | None = None
    why: str = ""


@dataclass(slots=True)
class RecipeRuns:
    """The recipes of one search.

    Args:
        keep: called with each recipe that is within what is allowed, and with the cost of its run.

    Attributes:
        done: what was run, or left out with a reason; in the order of the runs.
    """

    candidates: Candidates
    keep: KeepRun
    done: list[RecipeRun] = field(default_factory=list)

    def run(self) -> None:
        """Run all that may be part of the plan.

        Raises:
            SearchStopped: there was no time for all of them.
        """
        if not self._wanted():
            return
        recipes = self._allowed(cut=False)
        if self._may_cut() and not self._promising(recipes):
            recipes = self._allowed(cut=True)
        self._run_each(recipes)
        if self._may_cut():
            self._run_each(self._allowed(cut=True))
        profile = self.candidates.plain.profile
        tensors_fit = profile.peak_allocated_bytes + profile.outside_bytes <= self.candidates.request.limit
        if self._on_card() and tensors_fit and not self._plain_fits():
            self._run(expandable_segments())

    def run_beyond(self) -> None:
        """Run those that change results more than is allowed: alone, and where that does not fit, with others.

        Raises:
            SearchStopped: there was no time for all of them.
        """
        if not self._wanted():
            return
        level = self.candidates.request.numerics
        known = self.candidates.known_micro_batching
        cut = known is not None and known.setting is not None
        for recipe in self._recipes(cut=cut and not self._plain_fits()):
            if recipe.numerics > level and (recipe.quickens or not self._plain_fits()):
                self._run(recipe, beyond=True)

    # -- which -------------------------------------------------------------------------------------------------------

    def _wanted(self) -> bool:
        request = self.candidates.request
        return request.recipes and self.candidates.plain.profile.trains

    def _on_card(self) -> bool:
        return self.candidates.device.device_type == "cuda" and self.candidates.request.may(
            find_technique(ALLOCATOR)
        )

    def _may_cut(self) -> bool:
        profile = self.candidates.plain.profile
        may = self.candidates.request.may(find_technique(MICRO_BATCHING))
        return may and not profile.own_step and not self._plain_fits()

    def _recipes(self, *, cut: bool) -> list[HandRecipe]:
        """All recipes, those of one technique first."""
        candidates = self.candidates
        singles = list(single_recipes(candidates.plain, candidates.request, self._settled, cut=cut))
        return [*singles, *pairs_of(singles)]

    def _settled(self, choice: Choice) -> Choice | None:
        """A choice as it may be promised; nothing is tried for one that changes more than is allowed."""
        candidates = self.candidates
        beyond = choice.promise.numerics > candidates.request.numerics
        if beyond and candidates.known_micro_batching is None:
            return None
        return candidates.settled_choice(choice)

    def _allowed(self, *, cut: bool) -> list[HandRecipe]:
        return [
            recipe
            for recipe in self._recipes(cut=cut)
            if recipe.numerics <= self.candidates.request.numerics
            and (recipe.quickens or not self._plain_fits())
        ]

    def _expected(self, recipe: HandRecipe) -> float:
        return expected_bytes(self.candidates.plain, recipe)

    def _promising(self, recipes: list[HandRecipe]) -> bool:
        """Whether any is expected to fit."""
        limit = self.candidates.request.limit
        return any(self._expected(recipe) <= limit for recipe in recipes)

    def _plain_fits(self) -> bool:
        """Whether nothing has to be changed; for the lowest peak there is always something."""
        plain, request = self.candidates.plain, self.candidates.request
        total = plain.profile.peak_reserved_bytes + plain.profile.outside_bytes
        return total <= request.limit and request.objective != MEMORY

    def _idle(self, recipe: HandRecipe) -> str:
        """Why a recipe cannot be quicker than another one that was run; empty where it may be."""
        if self.candidates.request.objective == MEMORY or len(recipe.parts) == 1:
            return ""
        for run in self.done:
            if (
                run.cost is None
                or not run.cost.fits
                or run.cost.retries
                or not run.recipe.parts < recipe.parts
            ):
                continue
            more = [choice for choice in recipe.choices if choice not in run.recipe.choices]
            if not any(choice.technique.quickens for choice in more):
                return f"not run: {run.recipe.name} fits without more"
        return ""

    def _run_each(self, recipes: list[HandRecipe]) -> None:
        """The one with the least expected peak first, then those of one technique, then pairs."""
        if not self.done and recipes:
            self._run(min(recipes, key=self._expected))
        for recipe in recipes:
            self._run(recipe)

    # -- runs --------------------------------------------------------------------------------------------------------

    def _run(self, recipe: HandRecipe, *, beyond: bool = False) -> None:
        if any(run.recipe.name == recipe.name for run in self.done):
            return
        if why := self._idle(recipe):
            self.done.append(RecipeRun(recipe, why=why))
            return
        candidates = self.candidates
        candidates.progress(recipe.name)
        tail = candidates.plain.step.tail_seconds
        try:
            cost = self._cost(recipe, tail)
        except Exception as error:  # whatever a technique makes of a model that runs without it
            self.done.append(RecipeRun(recipe, why=f"not run: {brief(error)}"))
            return
        self.done.append(RecipeRun(recipe, cost))
        if not beyond:
            self.keep(recipe, cost)
        fragmented = cost.peak_allocated_bytes + cost.outside_bytes <= candidates.request.limit
        has_setting = any(choice.technique.name == ALLOCATOR for choice in recipe.choices)
        if self._on_card() and fragmented and not has_setting and not (cost.fits and not cost.retries):
            self._run(recipe + expandable_segments(), beyond=beyond)

    def _cost(self, recipe: HandRecipe, tail: float) -> StepCost:
        """What a recipe takes, within the budget where it may stay in it.

        A run without a limit shows the peak. What never comes near the limit runs in the same way within it.
        """
        candidates, limit = self.candidates, self.candidates.request.limit
        if self._expected(recipe) <= limit:
            return candidates.cost_or_error(recipe.choices, tail)
        cost = candidates.cost_without_limit(recipe.choices, tail)
        if cost.peak_allocated_bytes + cost.outside_bytes > limit:
            return replace(cost, fits=False)
        return candidates.cost_or_error(recipe.choices, tail)
