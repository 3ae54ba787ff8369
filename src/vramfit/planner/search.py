"""The joint choice: activations by a mixed-integer program, everything else searched around it.

NOTE [The search]: every technique is run once on the plain workload; what it did there gives guesses at combinations
(see memory_estimate.py), and the most promising is run, again and again, until nothing promises more than the best so
far. What was run is rated by the program of activation_ilp/solver.py, which says how to come within the budget, or how
low it could come. The end is never a guess: the choices are applied and run on the device with the budget as its
memory, and the program's budget is moved until that run fits; where it does not, the frame is known to need so much
more, and another is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vramfit.errors import UsageError
from vramfit.planner.activation_ilp.choices import activation_choices
from vramfit.planner.budget_fit import FittedCandidate, fit_to_budget, unsettled
from vramfit.planner.candidates import Candidate, Candidates, ScoredCandidate, choice_key, key_of
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.memory_estimate import Effect, MemoryEstimate, Part, Parts, guesses
from vramfit.planner.micro_batch_trial.batch_trial import MicroBatchVerdict
from vramfit.planner.plan_builder import SearchResult, build_plan
from vramfit.planner.plans import Plan
from vramfit.planner.request import MEMORY, THROUGHPUT, PlanRequest
from vramfit.planner.search_cache.cache import SearchCache
from vramfit.planner.search_cache.runs import Runs
from vramfit.planner.search_clock import INTERRUPTED, SearchClock, SearchStopped
from vramfit.planner.workload_check import check_hope
from vramfit.techniques import Choice, check_together

Progress = Callable[[str], None]

_FINE: Part = ("", "parts of blocks")
"""In place of a technique: parts of blocks are chosen for on their own."""

_ALLOCATOR = "allocator-settings"
"""Changes what the allocator holds beyond tensors, and nothing else."""

_LOOKS = 24
"""Combinations that are run."""

_PATIENCE = 5
"""Of them, how many in a row may be no better than the best before."""

_SETTLINGS = 4
"""Frames whose plans are run."""

_FIRST_TRIES = 3
"""Runs with which a frame is brought within the budget while there is no plan at all."""

_SPARED = 4
"""Runs for which time is left at the end of a limited search: those that bring its best plan within the budget."""

_WORTH = 0.005
"""Part of a step's seconds below which a technique more is not worth it."""

_POINTS = 12
"""Budgets of a frontier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """The quickest step for a budget, as predicted from the frames that were run.

    Attributes:
        total_bytes: of the device.
        step_seconds: estimated.
        techniques: each in words; those that the program chooses for activations last.
    """

    total_bytes: int
    step_seconds: float
    techniques: tuple[str, ...]


@dataclass(slots=True)
class PlanSearch:
    """One search for a plan.

    Args:
        device: where runs are priced.
        request: what is asked for.
        progress: told what is being done.
        start: techniques to look at together first.
        cutting: what another search found out about cutting the workload's batches.
        clock: of this search, and of others for the same answer.
        memory: of earlier searches; None without one.
        kept: what others of this process ran for the same workload, sizes and card.
    """

    device: DeviceBackend
    request: PlanRequest
    progress: Progress = lambda _text: None
    start: tuple[Choice, ...] = ()
    cutting: MicroBatchVerdict | None = None
    clock: SearchClock = field(default_factory=SearchClock)
    memory: SearchCache | None = None
    kept: Runs = field(default_factory=Runs)
    _frames: Candidates = field(init=False)
    _choices: dict[Part, Choice] = field(default_factory=dict)
    _effects: dict[Part, Effect] = field(default_factory=dict)
    _tried: set[Any] = field(default_factory=set)
    _rated: dict[Any, ScoredCandidate] = field(default_factory=dict)
    _settled: list[FittedCandidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing was run yet."""
        self._frames = Candidates(
            device=self.device,
            request=self.request,
            progress=self.progress,
            clock=self.clock,
            memory=self.memory,
            kept=self.kept,
            known_cutting=self.cutting,
        )
        self._choices.update((choice_key(choice), choice) for choice in self.start)

    def plan(self) -> Plan:
        """The best plan, or the best so far where the search is stopped; what was run is not lost then.

        Raises:
            NothingFits: none stays within the budget; it holds the one that came closest.
            UsageError: the workload cannot be run.
            KeyboardInterrupt: the search was interrupted before there was any plan.
        """
        began = self.clock.seconds
        plain = self._frames.plain
        check_hope(self._frames)
        try:
            self._settle_all()
        except SearchStopped:
            if self.clock.stopped == INTERRUPTED and not self._fitting():
                raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            if not self._fitting():
                raise
            self.clock.interrupt()
        best = min(self._settled, key=_settled_score, default=None)
        if best is None:  # there was no time for a run of any plan
            best = unsettled(self._frames, self._rate(plain))
        answer = SearchResult(settled=best, plain=plain, seconds=self.clock.seconds - began)
        return build_plan(self._frames, answer)

    def _fitting(self) -> bool:
        """Whether a plan was run that fits."""
        return any(one.price.fits for one in self._settled)

    def _settle_all(self) -> None:
        """Search, and run the plans of the best frames until one stays within the budget in truth.

        Raises:
            SearchStopped: the time was over.
        """
        short = False
        try:
            for _ in range(_SETTLINGS):
                try:
                    with self.clock.sparing(_SPARED):
                        best = self.best()
                except SearchStopped:
                    short, best = True, self._best()
                found = fit_to_budget(self._frames, best, seen=self._seen)
                if found.price.fits or best.lowest > self.request.limit:
                    break
                self._add_excess(best.frame, found)
        finally:
            if short:
                self.clock.run_out()

    def _seen(self, settled: FittedCandidate) -> bool:
        """Keep what was run; it is never good enough."""
        self._settled.append(settled)
        if settled.price.fits:
            self.clock.found()
        return False

    def _seen_first(self, settled: FittedCandidate) -> bool:
        """Keep what was run; a first plan only has to fit."""
        return self._seen(settled) or settled.price.fits

    def _add_excess(self, frame: Candidate, found: FittedCandidate) -> None:
        """A frame's plans need more than was predicted."""
        key = key_of(frame.choices, frame.fine)
        excess = found.price.total_bytes - max(self._rate(frame).lowest, self.request.limit)
        self._frames.excess[key] = self._frames.excess.get(key, 0) + max(excess, 1)

    def _secure(self, frame: Candidate) -> None:
        """Where there is no plan yet and a frame promises one, run it until it fits: the search may be stopped."""
        if self.request.objective != THROUGHPUT or self._fitting():
            return
        rated = self._rate(frame)
        if rated.solution is None:
            return
        with self.clock.sparing(0):
            found = fit_to_budget(self._frames, rated, seen=self._seen_first, tries=_FIRST_TRIES, quick=True)
        if not found.price.fits:
            self._add_excess(frame, found)

    @property
    def known_cutting(self) -> MicroBatchVerdict | None:
        """What is known by now of cutting the workload's batches, for another search."""
        return self._frames.known_cutting

    def seen(self) -> tuple[Candidate, ...]:
        """All combinations that were run so far."""
        return self._frames.seen()

    def best(self) -> ScoredCandidate:
        """The techniques around the program that the search leads to, as predicted.

        Raises:
            UsageError: the workload cannot be run.
        """
        return self._pruned(self._climb())

    # -- climbing ------------------------------------------------------------------------------------------------

    def _climb(self) -> ScoredCandidate:
        """The best frame that the guesses lead to."""
        self._secure(self._frames.plain)
        if self.start and (begun := self._frames.look(self.start)) is not None:
            self._secure(begun)
        best = self._best()
        patience = _PATIENCE
        for _ in range(_LOOKS):
            self._explore(best.frame)
            best = self._best()
            following = self._promising(best)
            if following is None or not patience:
                break
            frame = self._look(following)
            if frame is not None:
                self._secure(frame)
            if frame is not None and self._better(rated := self._rate(frame), best):
                best, patience = rated, _PATIENCE
            else:
                patience -= 1
        return best

    def _best(self) -> ScoredCandidate:
        return min(map(self._rate, self._frames.seen()), key=self._score)

    def _rate(self, frame: Candidate) -> ScoredCandidate:
        key = key_of(frame.choices, frame.fine)
        known = (key, self._frames.excess.get(key, 0))
        if known not in self._rated:
            self._rated[known] = self._frames.rated(frame)
        return self._rated[known]

    def _explore(self, frame: Candidate) -> None:
        """Run a frame with each technique whose effect is not known yet."""
        rated = self._rate(frame)
        # Where the budget costs next to nothing, more memory would win next to nothing.
        enough = (
            self.request.objective == THROUGHPUT
            and rated.solution is not None
            and rated.solution.extra_seconds < _WORTH * rated.seconds
        )
        if not enough and _FINE not in self._effects:
            self._learn(_FINE, frame, self._frames.look(frame.choices, fine=True))
        taken = {choice.name for choice in frame.choices}
        for choice in self._frames.options(frame, quickening=enough):
            part = choice_key(choice)
            tried = (part, key_of(frame.choices))
            if part in self._effects or tried in self._tried or choice.name in taken:
                continue
            if choice.name == _ALLOCATOR and not self._fragmented(rated):
                continue
            self._tried.add(tried)
            self._choices[part] = choice
            if self._possible(_parts(frame) | {part}):
                self._learn(part, frame, self._frames.look((*frame.choices, choice), fine=frame.fine))

    def _fragmented(self, rated: ScoredCandidate) -> bool:
        """Whether what the allocator holds beyond tensors decides anything: settings of it win no more than that."""
        frame = rated.frame
        loose = frame.outside - frame.profile.outside_bytes
        if self.request.objective == MEMORY:
            return loose > _WORTH * rated.lowest
        if rated.solution is None:
            return rated.lowest - loose <= self.request.limit
        budget = self.request.limit - self._frames.outside(frame) + loose
        without = self._frames.solve(frame, budget, quick=True)
        assert without is not None
        return without.extra_seconds < rated.solution.extra_seconds - _WORTH * rated.seconds

    def _learn(self, part: Part, before: Candidate, after: Candidate | None) -> None:
        if after is not None:
            self._effects[part] = Effect(before.outlook, after.outlook)
            self._secure(after)

    def _promising(self, best: ScoredCandidate) -> Parts | None:
        """The combination of the best guess that was not run yet; None if no guess is better than the best."""
        seen = {_parts(frame): self._with_excess(frame) for frame in self._frames.seen()}
        for guess in guesses(seen, self._effects, self._possible, self._guessed(best)):
            if self._frames.known(self._key(guess.parts)):
                continue
            score, theirs = self._guessed(best)(guess.outlook), self._score(best)
            better = score[0] < theirs[0] or (score[0] == theirs[0] and score[1] < theirs[1] * (1 - _WORTH))
            return guess.parts if better else None
        return None

    def _with_excess(self, frame: Candidate) -> MemoryEstimate:
        excess = self._frames.excess.get(key_of(frame.choices, frame.fine), 0)
        return replace(frame.outlook, outside=frame.outlook.outside + excess)

    def _guessed(self, best: ScoredCandidate) -> Callable[[MemoryEstimate], tuple[float, float]]:
        """What scores guesses, with the cost of recomputing as it was seen in the best frame."""
        limit = self.request.limit
        outlook, scale = best.frame.outlook, 1.0
        if best.solution is not None and outlook.seconds_within(limit) > outlook.seconds:
            scale = best.solution.extra_seconds / (outlook.seconds_within(limit) - outlook.seconds)

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
        return not any(failed <= key[0] and fine <= key[1] for failed, fine in self._frames.failed())

    def _key(self, parts: Parts) -> tuple[frozenset[Part], bool]:
        return (parts - {_FINE}, _FINE in parts)

    def _look(self, parts: Parts) -> Candidate | None:
        choices = tuple(choice for part, choice in self._choices.items() if part in parts)
        return self._frames.look(choices, fine=_FINE in parts)

    def _score(self, rated: ScoredCandidate) -> tuple[float, float]:
        """The smaller, the better."""
        if self.request.objective == MEMORY:
            return (float(rated.lowest), rated.seconds)
        if rated.solution is None:
            return (1.0, float(rated.lowest))
        return (0.0, rated.seconds)

    def _better(self, other: ScoredCandidate, best: ScoredCandidate) -> bool:
        """Whether a change is worth making: where both fit, only for a step that is quicker by a noticeable part."""
        mine, theirs = self._score(other), self._score(best)
        if mine[0] == theirs[0]:
            return mine[1] < theirs[1] * (1 - _WORTH)
        return mine < theirs

    def _pruned(self, best: ScoredCandidate) -> ScoredCandidate:
        """Without the techniques that others made superfluous."""
        for choice in best.frame.choices:
            rest = tuple(known for known in best.frame.choices if known is not choice)
            found = self._frames.look(rest, fine=best.frame.fine)
            if found is not None and not self._better(best, rated := self._rate(found)):
                best = rated
        return best

    # -- the frontier --------------------------------------------------------------------------------------------

    def frontier(self, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """The quickest step for each of some budgets between the lowest and the plain peak; none that is dominated."""
        frames = self._frames.seen()
        low = min(self._rate(frame).lowest for frame in frames)
        plain = self._frames.plain
        high = max(low, plain.profile.peak_reserved_bytes + plain.profile.outside_bytes)
        found: list[FrontierPoint] = []
        for number in range(points):
            budget = low + (high - low) * number // max(1, points - 1)
            self.progress(f"the frontier, {number + 1} of {points}")
            best = min(
                (point for frame in frames if (point := self._point(frame, budget)) is not None),
                key=lambda point: (point.step_seconds, point.total_bytes),
                default=None,
            )
            if best is not None and all(best.step_seconds < known.step_seconds for known in found):
                found.append(best)
        return tuple(found)

    def _point(self, frame: Candidate, budget: int) -> FrontierPoint | None:
        solution = self._frames.solve(frame, budget - frame.outside, quick=True)
        if solution is None:
            return None
        chosen = activation_choices(frame.observation, solution.decisions)
        return FrontierPoint(
            total_bytes=max(solution.peak_bytes, frame.profile.setup_bytes) + frame.outside,
            step_seconds=frame.observation.seconds + solution.extra_seconds,
            techniques=tuple(choice.words for choice in (*frame.choices, *chosen)),
        )


def _settled_score(settled: FittedCandidate) -> tuple[bool, float]:
    """The smaller, the better."""
    price = settled.price
    return (not price.fits, price.step_seconds if price.fits else float(price.total_bytes))


def _parts(frame: Candidate) -> Parts:
    found = frozenset(map(choice_key, frame.choices))
    return found | {_FINE} if frame.fine else found
