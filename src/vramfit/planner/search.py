"""The joint choice: activations by a mixed-integer program, everything else searched around it.

NOTE [The search]: every technique is run once on the plain workload; what it did there gives guesses at combinations
(see memory_estimate.py), and the most promising is run, again and again, until nothing promises more than the best so
far. What was run is scored by the program of activation_ilp/solver.py, which says how to come within the budget, or how
low it could come. The end is never a guess: the choices are applied and run on the device with the budget as its
memory, and the program's budget is moved until that run fits; where it does not, the candidate is known to need so much
more, and another is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vramfit.errors import UsageError
from vramfit.planner.activation_ilp.decisions import activation_choices
from vramfit.planner.candidates import (
    ACTIVATIONS,
    Candidate,
    Candidates,
    ScoredCandidate,
    choice_key,
    key_of,
)
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.hand_recipes import HandRecipe
from vramfit.planner.memory_estimate import Effect, MemoryEstimate, Part, Parts, guesses
from vramfit.planner.plan_builder import (
    FittedCandidate,
    build_plan,
    check_budget,
    fit_to_budget,
    not_run,
)
from vramfit.planner.plan_entries import entries_of
from vramfit.planner.plan_file import OtherWay
from vramfit.planner.plans import MEMORY, THROUGHPUT, Plan, PlanRequest
from vramfit.planner.recipe_runs import RecipeRuns
from vramfit.planner.rejections import beyond_ways, rejected_ways
from vramfit.planner.search_clock import INTERRUPTED, SearchClock, SearchStopped
from vramfit.techniques import Choice, check_together

Progress = Callable[[str], None]

_FINE: Part = ("", "parts of blocks")
"""In place of a technique: parts of blocks are chosen for on their own."""

_ALLOCATOR = "allocator-settings"
"""Changes what the allocator holds beyond tensors, and nothing else."""

_MOST_RUNS = 24
"""Combinations that are run."""

_PATIENCE = 5
"""Of them, how many in a row may be no better than the best before."""

_FITTED_CANDIDATES = 4
"""Candidates whose plans are run."""

_FIRST_TRIES = 3
"""Runs with which a candidate is brought within the budget while there is no plan at all."""

_SPARED = (4, 2)
"""Runs for which time is left at the end of a limited search: those that bring its best plan within the budget, and
say what each technique changes. What is left of that time after all goes to another round."""

_FOR_ENTRIES = 2
"""Of them, those that say what techniques change."""

_WORTH = 0.005
"""Part of a step's seconds below which a technique more is not worth it."""

_POINTS = 12
"""Budgets of a frontier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """The quickest step for a budget, as predicted from the candidates that were run.

    Attributes:
        total_bytes: of the device.
        step_seconds: estimated.
        techniques: each in words; those that the program chooses for activations last.
    """

    total_bytes: int
    step_seconds: float
    techniques: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFound:
    """What a search found, as it goes to another process.

    Attributes:
        frontier: peak against step time, from the lowest peak on; empty unless it was asked for.
    """

    plan: str
    frontier: tuple[FrontierPoint, ...] = ()


@dataclass(slots=True)
class PlanSearch:
    """One search for a plan.

    Args:
        candidates: to choose from; what was run of them before is not run again.
        start: techniques to run together first.
    """

    candidates: Candidates
    start: tuple[Choice, ...] = ()
    _choices: dict[Part, Choice] = field(default_factory=dict)
    _effects: dict[Part, Effect] = field(default_factory=dict)
    _tried: set[Any] = field(default_factory=set)
    _scores: dict[Any, ScoredCandidate] = field(default_factory=dict)
    _fitted: list[FittedCandidate] = field(default_factory=list)
    _recipes: RecipeRuns = field(init=False)
    _beyond: RecipeRuns = field(init=False)
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        """Register the first techniques."""
        self._choices.update((choice_key(choice), choice) for choice in self.start)
        self._recipes = RecipeRuns(self.candidates, self._keep_recipe)
        self._beyond = RecipeRuns(self.candidates, lambda _recipe, _cost: None)

    @property
    def request(self) -> PlanRequest:
        """What is asked for."""
        return self.candidates.request

    @property
    def clock(self) -> SearchClock:
        """The search's clock."""
        return self.candidates.clock

    def plan(self) -> Plan:
        """The best plan, or the best so far where the search is stopped; what was run is not lost then.

        Called again, it goes on where it was stopped.

        Raises:
            NothingFits: none stays within the budget; it holds the one that came closest.
            UsageError: the workload cannot be run.
            KeyboardInterrupt: the search was interrupted before there was any plan.
        """
        began, plain = self.clock.seconds, self.candidates.plain
        check_budget(self.candidates)
        short = False
        try:
            short = self._fit_to_budget()
        except SearchStopped:
            if self.clock.stopped == INTERRUPTED and not self._has_fitting():
                raise KeyboardInterrupt from None
            short = True
        except KeyboardInterrupt:
            if not self._has_fitting():
                raise
            self.clock.interrupt()
        best = min(self._fitted, key=self._fit_rank, default=None)
        if best is None:  # there was no time for a run of any plan
            best = not_run(self.candidates, self._scored(plain))
        best, entries = entries_of(self.candidates, best)
        self._run_beyond()
        if short:
            self.clock.run_out()
        self._seconds += self.clock.seconds - began
        return build_plan(
            self.candidates,
            best,
            self._seconds,
            entries=entries,
            rejected=self._rejected(best),
            freedom=beyond_ways(self.candidates, best, self._beyond.done),
        )

    def _rejected(self, best: FittedCandidate) -> tuple[OtherWay, ...]:
        scored = map(self._scored, self.candidates.seen()) if self.request.recipes else ()
        return rejected_ways(self.candidates, best, self._recipes.done, self._fitted, scored)

    def _run_beyond(self) -> None:
        """Run recipes beyond what is allowed, as far as there is time."""
        try:
            with self.clock.aside():
                self._beyond.run_beyond()
        except SearchStopped:
            pass
        except KeyboardInterrupt:
            self.clock.interrupt()

    def _fit_rank(self, fitted: FittedCandidate) -> tuple[float, ...]:
        """What fitted candidates are ordered by: smaller is better."""
        cost = fitted.cost
        by_time = cost.fits and self.request.objective != MEMORY
        return (not cost.fits, *(cost.time_first if by_time else cost.bytes_first))

    def _has_fitting(self) -> bool:
        """Whether a plan was run that fits."""
        return any(one.cost.fits for one in self._fitted)

    def _fit_to_budget(self) -> bool:
        """Search, and run the plans of the best candidates until one stays within the budget on the device.

        Returns:
            whether the search was cut short.

        Raises:
            SearchStopped: the time was over.
        """
        rounds = list(_SPARED)
        for _ in range(_FITTED_CANDIDATES):
            short = False
            try:
                with self.clock.sparing(rounds[0]):
                    self._recipes.run()
                    self._begin_with_recipe()
                    best = self.best()
            except SearchStopped:
                if self.clock.stopped:
                    raise
                short, best = True, self._best()
            with self.clock.sparing(_FOR_ENTRIES if self._has_fitting() and self.request.entries else 0):
                found = fit_to_budget(self.candidates, best, seen=self._keep)
            if short and len(rounds) > 1:
                rounds.pop(0)
                continue
            if short or found.cost.fits or best.lowest > self.request.limit:
                return short
            self._add_excess(best.candidate, found)
        return False

    def _begin_with_recipe(self) -> None:
        """Let the search go on from the best recipe, where that changes more than activations."""
        best = min(self._fitted, key=self._fit_rank, default=None)
        if best is None or not best.recipe or not best.cost.fits:
            return
        base = tuple(choice for choice in best.choices if choice.name not in ACTIVATIONS)
        self._choices.update((choice_key(choice), choice) for choice in base)
        self.candidates.run(base)
        if base:  # the program without them, but with others, may be quicker
            self._explore(self.candidates.plain)

    def _keep_recipe(self, recipe: HandRecipe, cost: StepCost) -> None:
        """Keep the run of a recipe, which may be the plan."""
        scored = self._scored(self.candidates.plain)
        self._keep(
            FittedCandidate(
                scored=scored, choices=recipe.choices, solution=None, cost=cost, recipe=recipe.name
            )
        )

    def _keep(self, fitted: FittedCandidate) -> bool:
        """Keep what was run; it is never good enough."""
        self._fitted.append(fitted)
        if fitted.cost.fits:
            self.clock.found()
        return False

    def _keep_first(self, fitted: FittedCandidate) -> bool:
        """Keep what was run; a first plan only has to fit."""
        return self._keep(fitted) or fitted.cost.fits

    def _add_excess(self, candidate: Candidate, found: FittedCandidate) -> None:
        """A candidate's plans need more than was predicted."""
        key = key_of(candidate.choices, candidate.fine)
        excess = found.cost.total_bytes - max(self._scored(candidate).lowest, self.request.limit)
        self.candidates.excess[key] = self.candidates.excess.get(key, 0) + max(excess, 1)

    def _fit_first(self, candidate: Candidate) -> None:
        """Where there is no plan yet and a candidate promises one, run it until it fits: the search may be stopped."""
        if self.request.objective != THROUGHPUT or self._has_fitting():
            return
        scored = self._scored(candidate)
        if scored.solution is None:
            return
        with self.clock.sparing(0):
            found = fit_to_budget(
                self.candidates, scored, seen=self._keep_first, tries=_FIRST_TRIES, quick=True
            )
        if not found.cost.fits:
            self._add_excess(candidate, found)

    def best(self) -> ScoredCandidate:
        """The techniques around the program that the search leads to, as predicted.

        Raises:
            UsageError: the workload cannot be run.
        """
        return self._pruned(self._climb())

    # -- climbing ------------------------------------------------------------------------------------------------

    def _climb(self) -> ScoredCandidate:
        """The best candidate that the guesses lead to."""
        self._fit_first(self.candidates.plain)
        if self.start and (begun := self.candidates.run(self.start)) is not None:
            self._fit_first(begun)
        best = self._best()
        patience = _PATIENCE
        for _ in range(_MOST_RUNS):
            self._explore(best.candidate)
            best = self._best()
            following = self._promising(best)
            if following is None or not patience:
                break
            candidate = self._run(following)
            if candidate is not None:
                self._fit_first(candidate)
            if candidate is not None and self._better(scored := self._scored(candidate), best):
                best, patience = scored, _PATIENCE
            else:
                patience -= 1
        return best

    def _best(self) -> ScoredCandidate:
        return min(map(self._scored, self.candidates.seen()), key=self._rank)

    def _scored(self, candidate: Candidate) -> ScoredCandidate:
        key = key_of(candidate.choices, candidate.fine)
        known = (key, self.candidates.excess.get(key, 0))
        if known not in self._scores:
            self._scores[known] = self.candidates.score(candidate)
        return self._scores[known]

    def _explore(self, candidate: Candidate) -> None:
        """Run a candidate with each technique whose effect is not known yet."""
        scored = self._scored(candidate)
        # Where the budget costs next to nothing, more memory would win next to nothing.
        enough = (
            self.request.objective == THROUGHPUT
            and scored.solution is not None
            and scored.solution.extra_seconds < _WORTH * scored.seconds
        )
        if not enough and _FINE not in self._effects:
            self._learn(_FINE, candidate, self.candidates.run(candidate.choices, fine=True))
        taken = {choice.name for choice in candidate.choices}
        for choice in self.candidates.options(candidate, quickening=enough):
            part = choice_key(choice)
            tried = (part, key_of(candidate.choices))
            if part in self._effects or tried in self._tried or choice.name in taken:
                continue
            if choice.name == _ALLOCATOR and not self._fragmented(scored):
                continue
            self._tried.add(tried)
            self._choices[part] = choice
            if self._possible(_parts(candidate) | {part}):
                self._learn(
                    part, candidate, self.candidates.run((*candidate.choices, choice), fine=candidate.fine)
                )

    def _fragmented(self, scored: ScoredCandidate) -> bool:
        """Whether what the allocator holds beyond tensors decides anything: settings of it win no more than that."""
        candidate = scored.candidate
        loose = candidate.outside - candidate.profile.outside_bytes
        if self.request.objective == MEMORY:
            return loose > _WORTH * scored.lowest
        if scored.solution is None:
            return scored.lowest - loose <= self.request.limit
        budget = self.request.limit - self.candidates.outside(candidate) + loose
        without = self.candidates.solve(candidate, budget, quick=True)
        assert without is not None
        return without.extra_seconds < scored.solution.extra_seconds - _WORTH * scored.seconds

    def _learn(self, part: Part, before: Candidate, after: Candidate | None) -> None:
        if after is not None:
            self._effects[part] = Effect(before.estimate, after.estimate)
            self._fit_first(after)

    def _promising(self, best: ScoredCandidate) -> Parts | None:
        """The combination of the best guess that was not run yet; None if no guess is better than the best."""
        seen = {_parts(candidate): self._with_excess(candidate) for candidate in self.candidates.seen()}
        for guess in guesses(seen, self._effects, self._possible, self._guessed(best)):
            if self.candidates.known(self._key(guess.parts)):
                continue
            score, theirs = self._guessed(best)(guess.estimate), self._rank(best)
            better = score[0] < theirs[0] or (score[0] == theirs[0] and score[1] < theirs[1] * (1 - _WORTH))
            return guess.parts if better else None
        return None

    def _with_excess(self, candidate: Candidate) -> MemoryEstimate:
        excess = self.candidates.excess.get(key_of(candidate.choices, candidate.fine), 0)
        return replace(candidate.estimate, outside=candidate.estimate.outside + excess)

    def _guessed(self, best: ScoredCandidate) -> Callable[[MemoryEstimate], tuple[float, float]]:
        """A function that scores guesses, with the cost of recomputing as the best candidate has it."""
        limit = self.request.limit
        estimate, scale = best.candidate.estimate, 1.0
        if best.solution is not None and estimate.seconds_within(limit) > estimate.seconds:
            scale = best.solution.extra_seconds / (estimate.seconds_within(limit) - estimate.seconds)

        def score(guess: MemoryEstimate) -> tuple[float, float]:
            if self.request.objective == MEMORY:
                return (guess.lowest, guess.seconds)
            if guess.lowest > limit:
                return (1.0, guess.lowest)
            return (0.0, guess.seconds + min(scale, 1.0) * (guess.seconds_within(limit) - guess.seconds))

        return score

    def _possible(self, parts: Parts) -> bool:
        """Whether techniques may be combined, as far as is known."""
        try:
            check_together(tuple(self._choices[part] for part in parts if part != _FINE))
        except UsageError:
            return False
        key = self._key(parts)
        return not any(failed <= key[0] and fine <= key[1] for failed, fine in self.candidates.failed())

    def _key(self, parts: Parts) -> tuple[frozenset[Part], bool]:
        return (parts - {_FINE}, _FINE in parts)

    def _run(self, parts: Parts) -> Candidate | None:
        choices = tuple(choice for part, choice in self._choices.items() if part in parts)
        return self.candidates.run(choices, fine=_FINE in parts)

    def _rank(self, scored: ScoredCandidate) -> tuple[float, float]:
        """What scored candidates are ordered by: smaller is better."""
        if self.request.objective == MEMORY:
            return (float(scored.lowest), scored.seconds)
        if scored.solution is None:
            return (1.0, float(scored.lowest))
        return (0.0, scored.seconds)

    def _better(self, other: ScoredCandidate, best: ScoredCandidate) -> bool:
        """Whether a change is worth making: where both fit, only for a step that is quicker by a noticeable part."""
        mine, theirs = self._rank(other), self._rank(best)
        if mine[0] == theirs[0]:
            return mine[1] < theirs[1] * (1 - _WORTH)
        return mine < theirs

    def _pruned(self, best: ScoredCandidate) -> ScoredCandidate:
        """Without the techniques that others made superfluous."""
        for choice in best.candidate.choices:
            rest = tuple(known for known in best.candidate.choices if known is not choice)
            found = self.candidates.run(rest, fine=best.candidate.fine)
            if found is not None and not self._better(best, scored := self._scored(found)):
                best = scored
        return best

    # -- the frontier --------------------------------------------------------------------------------------------

    def frontier(self, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """The quickest step for each of some budgets between the lowest and the plain peak; none that is dominated."""
        candidates = self.candidates.seen()
        low = min(self._scored(candidate).lowest for candidate in candidates)
        plain = self.candidates.plain
        high = max(low, plain.profile.peak_reserved_bytes + plain.profile.outside_bytes)
        found: list[FrontierPoint] = []
        for number in range(points):
            budget = low + (high - low) * number // max(1, points - 1)
            self.candidates.progress(f"the frontier, {number + 1} of {points}")
            best = min(
                (point for candidate in candidates if (point := self._point(candidate, budget)) is not None),
                key=lambda point: (point.step_seconds, point.total_bytes),
                default=None,
            )
            if best is not None and all(best.step_seconds < known.step_seconds for known in found):
                found.append(best)
        return tuple(found)

    def _point(self, candidate: Candidate, budget: int) -> FrontierPoint | None:
        solution = self.candidates.solve(candidate, budget - candidate.outside, quick=True)
        if solution is None:
            return None
        chosen = activation_choices(candidate.step, solution.decisions)
        return FrontierPoint(
            total_bytes=max(solution.peak_bytes, candidate.profile.setup_bytes) + candidate.outside,
            step_seconds=candidate.step.seconds + solution.extra_seconds,
            techniques=tuple(choice.words for choice in (*candidate.choices, *chosen)),
        )


def _parts(candidate: Candidate) -> Parts:
    found = frozenset(map(choice_key, candidate.choices))
    return found | {_FINE} if candidate.fine else found
