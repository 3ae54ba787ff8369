"""The joint choice: activations by a mixed-integer program, everything else searched around it.

NOTE [The search]: a *frame* is the workload with some techniques whose effect reaches everywhere (precision, loss,
optimizer, micro-batches ...), run once on the device and observed. For a frame the program of activations.py says
exactly how to come within the budget, or how low it could come at best. The search begins with the plain frame and
adds, exchanges or drops one technique at a time, whatever helps the objective most; effects that were seen on the plain
frame rank what to run next. The end is never a prediction: the choices are applied and run on the device with the
budget as its memory, and the program's budget is moved until that run fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vramfit.errors import UsageError
from vramfit.planner import activations
from vramfit.planner.activations import Solution, Terms
from vramfit.planner.choosing import activation_choices, finer_places, places, window_bytes
from vramfit.planner.observing import Observation
from vramfit.planner.pieces import fewer_pieces, repeated
from vramfit.planner.plan import Aim, Entry, Figures, Plan, Solved
from vramfit.planner.price import Device, Price
from vramfit.planner.request import MEMORY, THROUGHPUT, NothingFits, Request
from vramfit.techniques import (
    Choice,
    Profile,
    all_techniques,
    find_technique,
    setting_to_plain,
    with_choices,
)
from vramfit.techniques.applied import check_together

Progress = Callable[[str], None]

ACTIVATIONS = ("activation-checkpointing", "activation-offload")
"""Techniques that the program chooses settings for."""

_ROUNDS = 6
"""Times that a technique is added or exchanged."""

_LOOKS = 4
"""Frames that are run in a round."""

_TRIES = 10
"""Runs with which a solution is brought within the budget."""

_QUICK_GAP, _QUICK_SECONDS = 0.02, 1.0
"""Of solutions that only compare frames."""

_WORTH = 0.005
"""Part of a step's seconds below which a technique more is not worth it."""

_POINTS = 12
"""Budgets of a frontier."""

_CLOSE = 0.01
"""A part of the budget that is worth another run to make use of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The workload with some techniques, observed.

    Attributes:
        choices: the techniques.
        fine: whether parts of blocks are chosen for on their own.
        profile: what the techniques look at.
        observation: what the program works on.
        outside: bytes that the device's total has beyond what tensors hold: the context and fragmentation.
    """

    choices: tuple[Choice, ...]
    fine: bool
    profile: Profile
    observation: Observation
    outside: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rated:
    """A frame with what it comes to.

    Attributes:
        frame: it.
        solution: the decisions within the budget; None if there are none.
        lowest: the lowest total that it reaches, in bytes, as predicted.
        seconds: of a step, with the decisions.
    """

    frame: Frame
    solution: Solution | None
    lowest: int
    seconds: float


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
class _Effect:
    lowest: int
    seconds: float


@dataclass(slots=True)
class Search:
    """One search for a plan.

    Args:
        device: where runs are priced.
        request: what is asked for.
        progress: told what is being done.
    """

    device: Device
    request: Request
    progress: Progress = lambda _text: None
    runs: int = 0
    solver_seconds: float = 0.0
    _frames: dict[Any, Frame | None] = field(default_factory=dict)
    _prices: dict[Any, Price] = field(default_factory=dict)
    _effects: dict[Any, _Effect] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)

    def plan(self) -> Plan:
        """The best plan.

        Raises:
            NothingFits: none stays within the budget; it holds the one that came closest.
            UsageError: the workload cannot be run.
        """
        began = time.perf_counter()
        self.progress("the plain program")
        plain = self._frame((), fine=False)
        if plain is None:  # the plain frame raises what is wrong with it
            raise AssertionError("a plain frame always exists")
        best = self._climb(self._rated(plain))
        choices, solution, price = self._settle(best)
        return self._told(choices, solution, price, plain, time.perf_counter() - began)

    # -- frames --------------------------------------------------------------------------------------------------

    def _frame(self, choices: tuple[Choice, ...], *, fine: bool) -> Frame | None:
        """The workload with some techniques, observed; None where they cannot be applied."""
        key = (_key(choices), fine)
        if key not in self._frames:
            self._frames[key] = self._observed(choices, fine=fine)
        return self._frames[key]

    def _observed(self, choices: tuple[Choice, ...], *, fine: bool) -> Frame | None:
        request = self.request
        looked: Callable[[nn.Module], Sequence[str]] = finer_places if fine else places
        try:
            check_together(choices)
            looked_at, sizes, times = fewer_pieces(choices, request.sizes)
            workload = with_choices(request.workload, looked_at)
            self.runs += 1
            profile, observation = self.device.observe(workload, sizes, looked)
            if times != 1:
                observation = repeated(observation, times)
                profile = replace(
                    profile,
                    sizes=dict(request.sizes),
                    step_seconds=observation.seconds,
                    step_flops=observation.flops,
                    blocks=observation.blocks,
                )
        except UsageError:
            if not choices:
                raise
            return None
        reserved = profile.peak_reserved_bytes - profile.peak_allocated_bytes
        return Frame(
            choices=choices,
            fine=fine,
            profile=profile,
            observation=observation,
            outside=profile.outside_bytes + reserved,
        )

    def _rated(self, frame: Frame) -> Rated:
        terms = self._terms(frame)
        lowest = (
            max(activations.lowest_peak(frame.observation, terms), frame.profile.setup_bytes) + frame.outside
        )
        solution = None
        if lowest <= self.request.limit:
            solution = self._solve(frame, self.request.limit - frame.outside, quick=True)
        seconds = frame.observation.seconds + (0.0 if solution is None else solution.extra_seconds)
        return Rated(frame=frame, solution=solution, lowest=lowest, seconds=seconds)

    def _solve(self, frame: Frame, budget: int, *, quick: bool = False) -> Solution | None:
        if frame.profile.setup_bytes > budget:
            return None
        terms = self._terms(frame)
        if quick:
            terms = replace(terms, gap=_QUICK_GAP, time_limit=min(terms.time_limit, _QUICK_SECONDS))
        found = activations.solve(frame.observation, budget, terms)
        if found is not None:
            self.solver_seconds += found.seconds
        return found

    def _terms(self, frame: Frame) -> Terms:
        checkpointing, offload = (self.request.may(find_technique(name)) for name in ACTIVATIONS)
        return Terms(
            recompute=checkpointing,
            offload=offload and frame.profile.device_type == "cuda",
            host_bytes=self.request.host_bytes,
            link_bytes_per_second=frame.profile.link_bytes_per_second,
            window=window_bytes(frame.observation),
            time_limit=self.request.time_limit,
        )

    def _score(self, rated: Rated) -> tuple[float, float]:
        """The smaller, the better."""
        if self.request.objective == MEMORY:
            return (float(rated.lowest), rated.seconds)
        if rated.solution is None:
            return (1.0, float(rated.lowest))
        return (0.0, rated.seconds)

    # -- climbing ------------------------------------------------------------------------------------------------

    def _climb(self, best: Rated) -> Rated:
        plain = best
        for number in range(_ROUNDS):
            moves = self._moves(best)
            if number == 0:
                looked = moves
            else:
                looked = sorted(moves, key=lambda move: self._expected(best, move))[:_LOOKS]
            found = [rated for move in looked if (rated := self._look(*move)) is not None]
            if number == 0:
                for rated in found:
                    self._learn(plain, rated)
            if not found:
                break
            winner = min(found, key=self._score)
            if not self._better(winner, best):
                break
            best = winner
        return self._pruned(best)

    def _better(self, other: Rated, best: Rated) -> bool:
        """Whether a change is worth making: where both fit, only for a step that is quicker by a noticeable part."""
        mine, theirs = self._score(other), self._score(best)
        if mine[0] == theirs[0]:
            return mine[1] < theirs[1] * (1 - _WORTH)
        return mine < theirs

    def _look(self, choices: tuple[Choice, ...], fine: bool) -> Rated | None:
        self.progress(", ".join(choice.name for choice in choices) or "the plain program")
        frame = self._frame(choices, fine=fine)
        return None if frame is None else self._rated(frame)

    def _moves(self, best: Rated) -> list[tuple[tuple[Choice, ...], bool]]:
        """The neighbours of a frame: one technique more or set otherwise, or a finer choice of activations."""
        frame = best.frame
        moves = []
        # Where the budget costs next to nothing, more memory would win next to nothing.
        enough = (
            self.request.objective == THROUGHPUT
            and best.solution is not None
            and best.solution.extra_seconds < _WORTH * best.seconds
        )
        if not frame.fine and not enough:
            moves.append((frame.choices, True))
        for choice in self._options(frame.profile):
            others = tuple(known for known in frame.choices if known.name != choice.name)
            if choice in frame.choices or (enough and not choice.technique.quickens):
                continue
            try:
                check_together((*others, choice))
            except UsageError:
                continue
            moves.append(((*others, choice), frame.fine))
        return moves

    def _options(self, profile: Profile) -> Iterable[Choice]:
        for technique in all_techniques():
            if technique.name in ACTIVATIONS or not self.request.may(technique):
                continue
            for setting in technique.options(profile):
                if technique.promise(setting).numerics <= self.request.numerics:
                    yield Choice(technique=technique, setting=setting)

    def _learn(self, plain: Rated, rated: Rated) -> None:
        added = [choice for choice in rated.frame.choices if choice not in plain.frame.choices]
        key = _key(tuple(added)) if added else "fine"
        self._effects[key] = _Effect(
            lowest=rated.lowest - plain.lowest,
            seconds=rated.frame.observation.seconds - plain.frame.observation.seconds,
        )

    def _expected(self, best: Rated, move: tuple[tuple[Choice, ...], bool]) -> tuple[float, float]:
        """The score to expect of a neighbour, from the effect that its technique had alone."""
        choices, fine = move
        added = tuple(choice for choice in choices if choice not in best.frame.choices)
        effect = self._effects.get(_key(added) if added else "fine", _Effect(0, 0.0))
        lowest = best.lowest + effect.lowest
        seconds = best.seconds + effect.seconds
        del fine
        if self.request.objective == MEMORY:
            return (float(lowest), seconds)
        return (0.0, seconds) if lowest <= self.request.limit else (1.0, float(lowest))

    def _pruned(self, best: Rated) -> Rated:
        """Without the techniques that later ones made superfluous."""
        for choice in best.frame.choices:
            rest = tuple(known for known in best.frame.choices if known is not choice)
            found = self._look(rest, best.frame.fine)
            if found is not None and not self._better(best, found):
                best = found
        return best

    # -- settling ------------------------------------------------------------------------------------------------

    def _settle(self, best: Rated) -> tuple[tuple[Choice, ...], Solution | None, Price]:
        """Bring the best frame within the budget in truth, and use what is left of it."""
        frame, limit = best.frame, self.request.limit
        low = max(activations.lowest_peak(frame.observation, self._terms(frame)), frame.profile.setup_bytes)
        target = limit - frame.outside
        if self.request.objective == MEMORY or best.solution is None:
            target = low
        fitting: tuple[tuple[Choice, ...], Solution | None, Price] | None = None
        closest: tuple[tuple[Choice, ...], Solution | None, Price] | None = None
        failed_at = None
        for _ in range(_TRIES):
            solution = self._solve(frame, target)
            if solution is None:
                if target >= low:
                    break
                target = low
                continue
            choices = (*frame.choices, *activation_choices(frame.observation, solution.decisions))
            self.progress("a run with the plan")
            price = self._price(choices)
            over = price.total_bytes - limit
            if over <= 0:
                if fitting is None or price.step_seconds <= fitting[2].step_seconds:
                    fitting = (choices, solution, price)
                room = -over
                if not solution.decisions or room < _CLOSE * limit or self.request.objective == MEMORY:
                    break
                following = target + room * 3 // 4
                if failed_at is not None:
                    following = min(following, (target + failed_at) // 2)
                if following - target < _CLOSE * limit / 4:
                    break
                target = following
            else:
                if closest is None or price.total_bytes < closest[2].total_bytes:
                    closest = (choices, solution, price)
                if fitting is not None:
                    break
                failed_at = target
                if target <= low:
                    break
                target = max(low, target - max(over, round(0.002 * limit)))
        if fitting is not None:
            return fitting
        if closest is None:
            choices = frame.choices
            closest = (choices, None, self._price(choices))
        return closest

    def _price(self, choices: tuple[Choice, ...]) -> Price:
        """Run choices with the budget as the device's memory, or without a limit where that does not do."""
        key = _key(choices)
        if key not in self._prices:
            request = self.request
            workload = with_choices(request.workload, choices)
            self.runs += 1
            price = self.device.price(workload, dict(request.sizes), request.limit)
            if not price.fits and price.step_seconds == 0:
                self.runs += 1
                price = self.device.price(workload, dict(request.sizes), None)
                # It was seen not to fit, whatever it takes on a device that never has to give memory back.
                price = replace(
                    price,
                    fits=False,
                    peak_reserved_bytes=max(
                        price.peak_reserved_bytes, request.limit - price.outside_bytes + 1
                    ),
                )
            self._prices[key] = price
        return self._prices[key]

    # -- the frontier --------------------------------------------------------------------------------------------

    def frontier(self, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """The quickest step for each of some budgets between the lowest and the plain peak; none that is dominated."""
        frames = [frame for frame in self._frames.values() if frame is not None]
        rated = [self._rated(frame) for frame in frames]
        low = min(one.lowest for one in rated)
        plain = self._frames[(), False]
        assert plain is not None
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

    def _point(self, frame: Frame, budget: int) -> FrontierPoint | None:
        solution = self._solve(frame, budget - frame.outside, quick=True)
        if solution is None:
            return None
        chosen = activation_choices(frame.observation, solution.decisions)
        return FrontierPoint(
            total_bytes=max(solution.peak_bytes, frame.profile.setup_bytes) + frame.outside,
            step_seconds=frame.observation.seconds + solution.extra_seconds,
            techniques=tuple(choice.words for choice in (*frame.choices, *chosen)),
        )

    # -- the plan ------------------------------------------------------------------------------------------------

    def _told(
        self,
        choices: tuple[Choice, ...],
        solution: Solution | None,
        price: Price,
        plain: Frame,
        seconds: float,
    ) -> Plan:
        request = self.request
        before = Figures(
            peak_allocated_bytes=plain.profile.peak_allocated_bytes,
            peak_reserved_bytes=plain.profile.peak_reserved_bytes,
            total_bytes=plain.profile.peak_reserved_bytes + plain.profile.outside_bytes,
            host_bytes=0,
            step_seconds=plain.observation.seconds,
            step_flops=plain.observation.flops,
        )
        plan = Plan(
            entries=self._entries(choices, before, price),
            aim=Aim(
                device=self.device.name,
                budget_bytes=request.budget_bytes,
                margin_bytes=request.margin_bytes,
                host_budget_bytes=request.host_bytes,
                numerics=request.numerics,
                objective=request.objective,
                sizes=dict(request.sizes),
                target=request.target,
                torch=_torch_version(),
            ),
            before=before,
            after=price.figures,
            solved=Solved(
                status="nothing to choose" if solution is None else solution.status,
                gap=None if solution is None else solution.gap,
                seconds=self.solver_seconds,
                runs=self.runs,
                search_seconds=seconds,
            ),
            notes=tuple(self._notes),
        )
        if not plan.fits:
            raise self._nothing_fits(plan)
        return plan

    def _entries(self, choices: tuple[Choice, ...], before: Figures, price: Price) -> tuple[Entry, ...]:
        """Each technique with what it changes beyond those before it."""
        if not self.request.entries:
            return tuple(Entry(choice=choice) for choice in choices)
        entries = []
        total, seconds = before.total_bytes, before.step_seconds
        for count, choice in enumerate(choices, 1):
            if count == len(choices):
                found = price
            else:
                self.progress(f"what {choice.name} does")
                self.runs += 1
                workload = with_choices(self.request.workload, choices[:count])
                found = self.device.price(workload, dict(self.request.sizes), None)
            entries.append(
                Entry(
                    choice=choice,
                    saves_bytes=total - found.total_bytes,
                    costs_seconds=found.step_seconds - seconds,
                )
            )
            total, seconds = found.total_bytes, found.step_seconds
        return tuple(entries)

    def _nothing_fits(self, plan: Plan) -> NothingFits:
        from vramfit.units import format_bytes

        request = self.request
        plain = self._frames[(), False]
        assert plain is not None
        parameters = sum(p.numel() * p.element_size() for p in plain.profile.model.parameters())
        lowest = format_bytes(plan.after.total_bytes)
        limit = format_bytes(request.limit)
        if plain.profile.outside_bytes + parameters > request.limit:
            binds = f"the parameters alone take {format_bytes(parameters)}"
            hint = "Allow parameter-offload or lower precision, take a larger card, or shard the model over several"
        else:
            binds = f"{format_bytes(plan.after.peak_allocated_bytes)} are held at the peak with all that may be used"
            hint = "Allow more (--numerics, --allow), make the batch smaller, or take a larger card"
        return NothingFits(
            f"nothing fits {limit}: the lowest that was found is {lowest}; {binds}", hint, plan
        )


def _key(choices: tuple[Choice, ...]) -> Any:
    return tuple((choice.name, repr(setting_to_plain(choice.setting))) for choice in choices)


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
