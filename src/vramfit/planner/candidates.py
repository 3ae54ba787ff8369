"""The workload with some techniques: run once on the device, observed, and rated by what could come of it.

A *frame* is the workload with techniques whose effect reaches everywhere (precision, loss, optimizer, micro-batches).
For a frame the program of activation_ilp/solver.py says how to come within the budget, or how low it could come at
best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.activation_ilp import solver
from vramfit.planner.activation_ilp.choices import finer_places, places, window_bytes
from vramfit.planner.activation_ilp.decisions import IlpOptions, IlpSolution
from vramfit.planner.devices.cost import DeviceBackend, StepCost
from vramfit.planner.failures import brief
from vramfit.planner.memory_estimate import MemoryEstimate, memory_estimate_of
from vramfit.planner.micro_batch_runs import LOOKED_PIECES, fewer_pieces, price_with, repeated
from vramfit.planner.micro_batch_trial.batch_trial import MicroBatchVerdict, cutting_of, no_time_to_try
from vramfit.planner.micro_batch_trial.coupling import coupling_by_shapes
from vramfit.planner.request import MEMORY, PlanRequest
from vramfit.planner.search_cache.cache import SearchCache, Sight, figures_of, is_remembered, profile_from
from vramfit.planner.search_cache.runs import Runs, Watched
from vramfit.planner.search_clock import SearchClock, SearchStopped
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import (
    Choice,
    Profile,
    all_techniques,
    check_together,
    find_technique,
    setting_to_plain,
    with_choices,
)
from vramfit.techniques.gradient_caching import GradientCachingSetting
from vramfit.techniques.micro_batching import MicroBatchingSetting
from vramfit.techniques.support.host_lane import PINNED_ROUNDING

Progress = Callable[[str], None]
Key: TypeAlias = tuple[Any, ...]

MICRO_BATCHING = "micro-batching"

ACTIVATIONS = ("activation-checkpointing", "activation-offload")
"""Techniques that the program chooses settings for."""

_SLACK = 0.02
"""Part of the budget that the allocator is expected to hold beyond its tensors, at most; runs tell the truth."""

_QUICK_GAP, _QUICK_SECONDS = 0.02, 2.0
"""Of solutions that only compare frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The workload with some techniques, observed.

    Attributes:
        choices: the techniques.
        fine: whether parts of blocks are chosen for on their own.
        profile: what the techniques look at.
        observation: what the program works on.
        outside: bytes that the device's total has beyond what tensors hold: the context and fragmentation.
        outlook: what the peak is made of.
    """

    choices: tuple[Choice, ...]
    fine: bool
    profile: Profile
    observation: StepProfile
    outside: int
    outlook: MemoryEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCandidate:
    """A frame with what it comes to.

    Attributes:
        frame: it.
        solution: the decisions within the budget; None if there are none.
        lowest: the lowest total that it reaches, in bytes, as predicted.
        seconds: of a step, with the decisions.
    """

    frame: Candidate
    solution: IlpSolution | None
    lowest: int
    seconds: float


@dataclass(slots=True)
class Candidates:
    """All frames that were run for a request.

    Args:
        device: where runs are priced.
        request: what is asked for.
        progress: told what is being done.
        clock: says whether another run may begin.
        memory: of earlier searches; None without one.
        kept: runs of this search, and of others of this process for the same workload, sizes and card.

    Attributes:
        solver_seconds: spent in the solver so far.
        known_cutting: what is known of cutting the workload's batches; None where that was not asked yet.
        excess: bytes by which the runs of a frame's plans were above what was predicted, by key.
    """

    device: DeviceBackend
    request: PlanRequest
    progress: Progress = lambda _text: None
    clock: SearchClock = field(default_factory=SearchClock)
    memory: SearchCache | None = None
    kept: Runs = field(default_factory=Runs)
    solver_seconds: float = 0.0
    excess: dict[Key, int] = field(default_factory=dict)
    _frames: dict[Key, Candidate | None] = field(default_factory=dict)
    _prices: dict[Key, StepCost] = field(default_factory=dict)
    _solutions: dict[tuple[Key, int, bool], IlpSolution | None] = field(default_factory=dict)
    known_cutting: MicroBatchVerdict | None = None
    _broken: dict[str, str] = field(default_factory=dict)

    def look(self, choices: tuple[Choice, ...], *, fine: bool = False) -> Candidate | None:
        """The workload with some techniques, observed; None where they cannot be applied, or want too much of the host.

        Raises:
            UsageError: the plain workload cannot be run.
            SearchStopped: there is no time for it.
        """
        key = key_of(choices, fine)
        if key not in self._frames:
            self.progress(", ".join(choice.name for choice in choices) or "the plain program")
            self._frames[key] = self._observed(choices, fine=fine)
        return self._frames[key]

    def seen(self) -> tuple[Candidate, ...]:
        """All frames so far that could be run."""
        return tuple(frame for frame in self._frames.values() if frame is not None)

    def known(self, key: Key) -> bool:
        """Whether a frame was tried, with whatever result."""
        return key in self._frames

    def failed(self) -> tuple[Key, ...]:
        """Those that could not be applied."""
        return tuple(key for key, frame in self._frames.items() if frame is None)

    @property
    def runs(self) -> int:
        """On the device so far."""
        return self.kept.count

    @property
    def plain(self) -> Candidate:
        """The workload as it is."""
        found = self.look(())
        if found is None:  # the plain frame raises what is wrong with it
            raise AssertionError("a plain frame always exists")
        return found

    def _observed(self, choices: tuple[Choice, ...], *, fine: bool) -> Candidate | None:
        request = self.request
        try:
            check_together(choices)
        except UsageError:  # each says so of the other in its own description
            return None
        seen = self._recalled(choices, fine) or self._watched(choices, fine)
        if seen is None or seen[1] is None:
            return None
        profile, observation = seen
        _, _, times = fewer_pieces(choices, request.sizes, LOOKED_PIECES)
        if profile.host_peak_bytes > request.host_bytes and choices:
            return None
        if times != 1:
            observation = repeated(observation, times)
            profile = replace(
                profile,
                sizes=dict(request.sizes),
                step_seconds=observation.seconds,
                step_flops=observation.flops,
                blocks=observation.blocks,
            )
        reserved = profile.peak_reserved_bytes - profile.peak_allocated_bytes
        # On an endless device the allocator has no reason to give anything back: within a budget it keeps less.
        outside = profile.outside_bytes + min(reserved, round(_SLACK * request.limit))
        return Candidate(
            choices=choices,
            fine=fine,
            profile=profile,
            observation=observation,
            outside=outside,
            outlook=memory_estimate_of(observation, self._terms(profile, observation), profile, outside),
        )

    def _recalled(
        self, choices: tuple[Choice, ...], fine: bool
    ) -> tuple[Profile, StepProfile] | tuple[None, None] | None:
        """A combination as an earlier search saw it; None where it did not. A process runs the plain program once."""
        kept = self.kept.watched.get(key_of(choices, fine))
        if kept is not None and kept.profile is not None and kept.observation is not None:
            return kept.profile, kept.observation
        if kept is not None:
            self._broken.setdefault(_named(choices), kept.failed)
            return None, None
        if self.memory is None or not (choices or fine):
            return None
        sight = self.memory.sight(choices, fine, self.request.sizes)
        if sight is None:
            return None
        if sight.observation is None:
            self._broken.setdefault(_named(choices), sight.failed or "")
            return None, None
        return profile_from(sight.figures, self.request.sizes, self.request.host_bytes, sight.observation)

    def _watched(
        self, choices: tuple[Choice, ...], fine: bool
    ) -> tuple[Profile, StepProfile] | tuple[None, None]:
        """A combination as it runs now; nothing where it does not run."""
        request, memory = self.request, self.memory
        if choices or fine:  # without the plain program there is nothing to tell
            self.clock.check()
        looked: Callable[[nn.Module], Sequence[str]] = finer_places if fine else places
        try:
            looked_at, sizes, _ = fewer_pieces(choices, request.sizes, LOOKED_PIECES)
            workload = with_choices(request.workload, looked_at)
            self.kept.count += 1
            with self.clock.running():
                profile, observation = self.device.observe(workload, sizes, looked)
        except Exception as error:  # whatever a technique makes of a model that runs without it
            if not choices:
                raise
            failed = self._note_broken(choices, error)
            self.kept.watched[key_of(choices, fine)] = Watched(None, None, failed)
            if memory is not None:
                memory.add_sight(
                    choices, fine, request.sizes, Sight(observation=None, figures={}, failed=failed)
                )
            return None, None
        if memory is not None:
            sight = Sight(observation=observation, figures=figures_of(profile))
            if not (choices or fine) and not memory.agrees((), request.sizes, sight):
                memory.forget()
            memory.add_sight(choices, fine, request.sizes, sight)
        self.kept.watched[key_of(choices, fine)] = Watched(profile, observation)
        return profile, observation

    def _note_broken(self, choices: Iterable[Choice], error: Exception) -> str:
        """Keep why a combination is left out: refused by a technique, or failed in the workload's code or ours."""
        if isinstance(error, UsageError):
            why = f": {error.message}"
        else:
            why = f": the workload fails with it ({brief(error)})"
        return self._broken.setdefault(_named(choices), why)

    def rated(self, frame: Candidate) -> ScoredCandidate:
        """What a frame comes to within the budget."""
        lowest = self.lowest(frame) + self.outside(frame)
        solution = None
        if lowest <= self.request.limit:
            solution = self.solve(frame, self.request.limit - self.outside(frame), quick=True)
        seconds = frame.observation.seconds + (0.0 if solution is None else solution.extra_seconds)
        return ScoredCandidate(frame=frame, solution=solution, lowest=lowest, seconds=seconds)

    def lowest(self, frame: Candidate) -> int:
        """The lowest predicted peak of a frame's tensors, in bytes; any within the budget, unless memory is the aim."""
        terms = self.terms(frame)
        enough = 0 if self.request.objective == MEMORY else self.request.limit - self.outside(frame)
        lowest = solver.lowest_peak(frame.observation, terms, enough=enough)
        return max(lowest, frame.profile.setup_bytes)

    def outside(self, frame: Candidate) -> int:
        """Bytes beyond what its tensors hold by prediction: context, fragmentation, and what was wrong before."""
        return frame.outside + self.excess.get(key_of(frame.choices, frame.fine), 0)

    def solve(self, frame: Candidate, budget: int, *, quick: bool = False) -> IlpSolution | None:
        """The cheapest decisions with which a frame's tensors stay within a budget of bytes; None without any."""
        if frame.profile.setup_bytes > budget:
            return None
        key = (key_of(frame.choices, frame.fine), budget, quick)
        if key not in self._solutions:
            self._solutions[key] = self._solved(frame, budget, quick=quick)
        return self._solutions[key]

    def _solved(self, frame: Candidate, budget: int, *, quick: bool) -> IlpSolution | None:
        terms = self.terms(frame)
        if quick:
            terms = replace(terms, gap=_QUICK_GAP, time_limit=min(terms.time_limit, _QUICK_SECONDS))
        found = solver.solve(frame.observation, budget, terms)
        if found is not None:
            self.solver_seconds += found.seconds
        return found

    def terms(self, frame: Candidate) -> IlpOptions:
        """What may be chosen in a frame."""
        return self._terms(frame.profile, frame.observation)

    def _terms(self, profile: Profile, observation: StepProfile) -> IlpOptions:
        checkpointing, offload = (self.request.may(find_technique(name)) for name in ACTIVATIONS)
        return IlpOptions(
            recompute=checkpointing,
            offload=offload and profile.device_type == "cuda",
            host_bytes=max(0, self.request.host_bytes - profile.host_peak_bytes) // PINNED_ROUNDING,
            link_bytes_per_second=profile.link_bytes_per_second,
            window=window_bytes(observation),
            time_limit=self.request.time_limit,
        )

    def options(self, frame: Candidate, *, quickening: bool = False) -> Iterator[Choice]:
        """What could be added to a frame, the mildest setting of each technique first.

        Args:
            frame: it.
            quickening: whether only what may make a step quicker is asked for.
        """
        for choice in self._offers(frame):
            technique, setting = choice.technique, choice.setting
            if quickening and not technique.quickens:
                continue
            if technique.promise(setting).numerics > self.request.numerics:
                continue
            if isinstance(setting, MicroBatchingSetting):
                known = self.cutting.setting
                if known is None:
                    continue
                setting = replace(
                    setting, reduction=known.reduction, labels=known.labels, ignore_index=known.ignore_index
                )
            if isinstance(setting, GradientCachingSetting):
                if not self.cutting.encoders:
                    continue
                setting = replace(setting, modules=self.cutting.encoders)
            yield Choice(technique=technique, setting=setting)

    def _offers(self, frame: Candidate) -> tuple[Choice, ...]:
        """What techniques offer, whatever their numerics; micro-batching last, which first has to be tried."""
        techniques = sorted(
            (one for one in all_techniques() if one.name not in ACTIVATIONS and self.request.may(one)),
            key=lambda one: one.name == MICRO_BATCHING,
        )
        names, given = [one.name for one in techniques], (frame.choices, frame.fine, self.request.sizes)
        asked = self.request.host_bytes
        known = None if self.memory is None else self.memory.offers(*given, asked, names)
        if known is not None:
            return known
        profile = frame.profile
        if is_remembered(profile):
            found, _ = self._watched(frame.choices, frame.fine)
            if found is None:
                return ()
            profile = replace(found, sizes=profile.sizes, step_seconds=profile.step_seconds)
            profile = replace(profile, step_flops=profile.step_flops, blocks=profile.blocks)
        offers = tuple(
            Choice(technique=one, setting=setting) for one in techniques for setting in one.options(profile)
        )
        if self.memory is not None:
            self.memory.add_offers(*given, asked, names, offers)
        return offers

    @property
    def cutting(self) -> MicroBatchVerdict:
        """What is known of cutting the workload's batches."""
        if self.known_cutting is None:
            named = MICRO_BATCHING in (self.request.allowed or ())
            sizes, memory = self.request.sizes, self.memory
            self.known_cutting = self.kept.cutting
            if self.known_cutting is None and memory is not None:
                self.known_cutting = memory.cutting(sizes, by_name=named)
            if self.known_cutting is None:
                try:
                    self.known_cutting = self._tried_cutting(by_name=named)
                except SearchStopped:
                    self.known_cutting = no_time_to_try(by_name=named)
                    raise
                if memory is not None and not self.known_cutting.over:
                    memory.add_cutting(sizes, self.known_cutting, by_name=named)
            if not self.known_cutting.over:
                self.kept.cutting = self.known_cutting
        return self.known_cutting

    def _tried_cutting(self, *, by_name: bool) -> MicroBatchVerdict:
        workload = self.request.workload

        def probe() -> str:
            self.clock.check()
            return coupling_by_shapes(self.device, workload, self.request.sizes)

        self.clock.check()
        self.progress("whether batches can be cut")
        return cutting_of(workload, self.plain.profile, by_name=by_name, probe=probe, clock=self.clock)

    def notes(self, choices: Iterable[Choice]) -> tuple[str, ...]:
        """What a reader of a plan with these techniques should know."""
        cut = any(isinstance(choice.setting, MicroBatchingSetting) for choice in choices)
        known = self.known_cutting
        found = [f"{name} is left out{why}." for name, why in self._broken.items()]
        if known is not None and (cut or known.setting is None):
            found.append(known.note)
        return tuple(found)

    def price(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        """Run choices with the budget as the device's memory, or without a limit where that does not do.

        Args:
            choices: the techniques.
            tail: seconds of the optimizer's step, which comes once, however many micro-batches there are.
        """
        key = key_of(choices)
        if key not in self._prices:
            try:
                self._prices[key] = self._priced(choices, tail)
            except Exception as error:
                if not choices:
                    raise
                self._note_broken(choices, error)
                self._prices[key] = self.unknown_price()
        return self._prices[key]

    def _priced(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        request = self.request
        price = self._run(choices, tail, request.limit)
        if not price.fits and price.step_seconds == 0:
            price = self.unlimited(choices, tail)
            # It was seen not to fit, whatever it takes on a device that never has to give memory back.
            least = request.limit - price.outside_bytes + 1
            return replace(price, fits=False, peak_reserved_bytes=max(price.peak_reserved_bytes, least))
        if price.host_bytes > request.host_bytes and choices:
            return replace(price, fits=False)
        return price

    def unknown_price(self) -> StepCost:
        """What a plan is taken for that cannot be run, or was not: it saves nothing."""
        profile = self.plain.profile
        return StepCost(
            fits=False,
            peak_allocated_bytes=profile.peak_allocated_bytes,
            peak_reserved_bytes=max(
                profile.peak_reserved_bytes, self.request.limit - profile.outside_bytes + 1
            ),
            outside_bytes=profile.outside_bytes,
            step_seconds=profile.step_seconds,
        )

    def unlimited(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        """Run choices on a device that has as much memory as they take.

        Raises:
            SearchStopped: there is no time for it.
        """
        return self._run(choices, tail, None)

    def _run(self, choices: tuple[Choice, ...], tail: float, budget: int | None) -> StepCost:
        request, memory = self.request, self.memory
        key = (key_of(choices), budget, tail)
        known = self.kept.prices.get(key)
        if known is None and memory is not None:
            known = memory.price(choices, request.sizes, budget, tail)
        if known is not None:
            return known
        self.clock.check()
        self.kept.count += 1
        with self.clock.running():
            price = price_with(self.device, request.workload, choices, request.sizes, budget, tail=tail)
        self.kept.prices[key] = price
        if memory is not None:
            memory.add_price(choices, request.sizes, budget, tail, price)
        return price


def _named(choices: Iterable[Choice]) -> str:
    return " with ".join(choice.name for choice in choices)


def key_of(choices: Iterable[Choice], fine: bool = False) -> Key:
    """What tells one set of choices from another, in whatever order."""
    return (frozenset(map(choice_key, choices)), fine)


def choice_key(choice: Choice) -> tuple[str, str]:
    """What tells one choice from another."""
    return (choice.name, repr(setting_to_plain(choice.setting)))
