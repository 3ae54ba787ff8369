"""Candidates: the workload with some techniques, run once on the device, profiled, and scored by what they could reach.

A candidate is the workload with techniques whose effect reaches everywhere (precision, loss, optimizer, micro-batches).
For a candidate the program of activation_ilp/solver.py says how to come within the budget, or how low it could come at
best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.host_lane import PINNED_ROUNDING
from vramfit.planner.activation_ilp import solver
from vramfit.planner.activation_ilp.decisions import (
    IlpOptions,
    IlpSolution,
    finer_places,
    places,
    window_bytes,
)
from vramfit.planner.devices.cost import (
    PROFILED_MICRO_BATCHES,
    DeviceBackend,
    StepCost,
    cut_short,
    scaled_up,
    step_cost_with,
    with_fewer_micro_batches,
)
from vramfit.planner.memory_estimate import MemoryEstimate, memory_estimate_of
from vramfit.planner.micro_batch_trial import (
    MicroBatchVerdict,
    coupling_by_shapes,
    no_time_to_try,
    try_micro_batching,
)
from vramfit.planner.plans import MEMORY, PlanRequest
from vramfit.planner.search_cache import (
    CachedStep,
    ProfiledRun,
    Runs,
    SearchCache,
    figures_of,
    is_remembered,
    profile_from,
)
from vramfit.planner.search_clock import SearchClock, SearchStopped
from vramfit.planner.step_profiler import StepProfile
from vramfit.planner.workload_check import brief
from vramfit.planner.workload_samples import WorkloadSamples
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

Progress = Callable[[str], None]
Key: TypeAlias = tuple[Any, ...]

MICRO_BATCHING = "micro-batching"

ACTIVATIONS = ("activation-checkpointing", "activation-offload")
"""Techniques that the program chooses settings for."""

_SLACK = 0.02
"""Part of the budget that the allocator is expected to hold beyond its tensors, at most; runs show what it holds."""

_QUICK_GAP, _QUICK_SECONDS = 0.02, 2.0
"""The gap and the seconds of solutions that only compare candidates."""

_LEAST_SECONDS = 0.5
"""Seconds that a solution may take where a search has no more time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The workload with some techniques, profiled.

    Attributes:
        fine: whether parts of blocks are chosen for on their own.
        profile: what the techniques look at.
        step: what the program works on.
        outside: bytes that the device's total has beyond what tensors hold: the context and fragmentation.
        estimate: what the peak is made of.
    """

    choices: tuple[Choice, ...]
    fine: bool
    profile: Profile
    step: StepProfile
    outside: int
    estimate: MemoryEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCandidate:
    """A candidate with its score: what a step takes within the budget.

    Attributes:
        solution: the decisions within the budget; None if there are none.
        lowest: the lowest total that it reaches, in bytes, as predicted.
        seconds: of a step, with the decisions.
    """

    candidate: Candidate
    solution: IlpSolution | None
    lowest: int
    seconds: float


@dataclass(slots=True)
class Candidates:
    """All candidates that were run for a request.

    Args:
        clock: decides whether another run may begin.
        cache: of earlier searches; None without one.
        kept: runs of this search, and of others of this process for the same workload, sizes and card.

    Attributes:
        solver_seconds: spent in the solver so far.
        known_micro_batching: what is known of cutting the workload's batches; None where that was not asked yet.
        excess: bytes by which the runs of a candidate's plans were above what was predicted, by key.
    """

    device: DeviceBackend
    request: PlanRequest
    progress: Progress = lambda _text: None
    clock: SearchClock = field(default_factory=SearchClock)
    cache: SearchCache | None = None
    kept: Runs = field(default_factory=Runs)
    solver_seconds: float = 0.0
    excess: dict[Key, int] = field(default_factory=dict)
    _by_key: dict[Key, Candidate | None] = field(default_factory=dict)
    _costs: dict[Key, StepCost] = field(default_factory=dict)
    _solutions: dict[tuple[Key, int, bool], IlpSolution | None] = field(default_factory=dict)
    known_micro_batching: MicroBatchVerdict | None = None
    _broken: dict[str, str] = field(default_factory=dict)
    _samples: WorkloadSamples | None = None

    def run(self, choices: tuple[Choice, ...], *, fine: bool = False) -> Candidate | None:
        """The workload with some techniques, profiled; None where they cannot be applied, or want too much of the host.

        Raises:
            UsageError: the plain workload cannot be run.
            SearchStopped: there is no time for it.
        """
        key = key_of(choices, fine)
        if key not in self._by_key:
            self.progress(", ".join(choice.name for choice in choices) or "the plain program")
            self._by_key[key] = self._profiled(choices, fine=fine)
        return self._by_key[key]

    def seen(self) -> tuple[Candidate, ...]:
        """All candidates so far that could be run."""
        return tuple(candidate for candidate in self._by_key.values() if candidate is not None)

    def known(self, key: Key) -> bool:
        """Whether a candidate was tried, with whatever result."""
        return key in self._by_key

    def failed(self) -> tuple[Key, ...]:
        """The keys of the candidates that could not be applied."""
        return tuple(key for key, candidate in self._by_key.items() if candidate is None)

    @property
    def runs(self) -> int:
        """How many runs were made on the device so far."""
        return self.kept.count

    @property
    def plain(self) -> Candidate:
        """The workload as it is."""
        found = self.run(())
        if found is None:  # the plain candidate raises what is wrong with it
            raise AssertionError("a plain candidate always exists")
        return found

    def _profiled(self, choices: tuple[Choice, ...], *, fine: bool) -> Candidate | None:
        request = self.request
        try:
            check_together(choices)
        except UsageError:  # each says so of the other in its own description
            return None
        seen = self._recalled(choices, fine) or self._profile_now(choices, fine)
        if seen is None or seen[1] is None:
            return None
        profile, step = seen
        _, _, times = with_fewer_micro_batches(choices, request.sizes, PROFILED_MICRO_BATCHES)
        if profile.host_peak_bytes > request.host_bytes and choices:
            return None
        if times != 1:
            step = scaled_up(step, times)
            profile = replace(
                profile,
                sizes=dict(request.sizes),
                step_seconds=step.seconds,
                step_flops=step.flops,
                blocks=step.blocks,
            )
        reserved = profile.peak_reserved_bytes - profile.peak_allocated_bytes
        # On an endless device the allocator has no reason to give anything back: within a budget it keeps less.
        outside = profile.outside_bytes + min(reserved, round(_SLACK * request.limit))
        return Candidate(
            choices=choices,
            fine=fine,
            profile=profile,
            step=step,
            outside=outside,
            estimate=memory_estimate_of(step, self._ilp_options(profile, step), profile, outside),
        )

    def _recalled(
        self, choices: tuple[Choice, ...], fine: bool
    ) -> tuple[Profile, StepProfile] | tuple[None, None] | None:
        """A combination as an earlier search saw it; None where it did not. A process runs the plain program once."""
        kept = self.kept.profiled.get(key_of(choices, fine))
        if kept is not None and kept.profile is not None and kept.step is not None:
            return kept.profile, kept.step
        if kept is not None:
            self._broken.setdefault(_named(choices), kept.failed)
            return None, None
        if self.cache is None or not (choices or fine):
            return None
        cached = self.cache.step(choices, fine, self.request.sizes)
        if cached is None:
            return None
        if cached.step is None:
            self._broken.setdefault(_named(choices), cached.failed or "")
            return None, None
        return profile_from(cached.figures, self.request.sizes, self.request.host_bytes, cached.step)

    def _profile_now(
        self, choices: tuple[Choice, ...], fine: bool
    ) -> tuple[Profile, StepProfile] | tuple[None, None]:
        """A combination as it runs now; nothing where it does not run."""
        request, cache = self.request, self.cache
        if choices or fine:  # without the plain program there is no plan at all
            self.clock.check()
        find_places: Callable[[nn.Module], Sequence[str]] = finer_places if fine else places
        try:
            reduced, sizes, _ = with_fewer_micro_batches(choices, request.sizes, PROFILED_MICRO_BATCHES)
            workload = with_choices(request.workload, reduced)
            self.kept.count += 1
            with self.clock.running():
                profile, step = self.device.profile_step(workload, sizes, find_places)
        except Exception as error:  # whatever a technique makes of a model that runs without it
            if not choices:
                raise
            failed = self._note_broken(choices, error)
            self.kept.profiled[key_of(choices, fine)] = ProfiledRun(None, None, failed)
            if cache is not None:
                cache.add_step(choices, fine, request.sizes, CachedStep(step=None, figures={}, failed=failed))
            return None, None
        if cache is not None:
            cached = CachedStep(step=step, figures=figures_of(profile))
            if not (choices or fine) and not cache.agrees((), request.sizes, cached):
                cache.forget()
            cache.add_step(choices, fine, request.sizes, cached)
        self.kept.profiled[key_of(choices, fine)] = ProfiledRun(profile, step)
        return profile, step

    def _note_broken(self, choices: Iterable[Choice], error: Exception) -> str:
        """Keep why a combination is left out: refused by a technique, or failed in the workload's code or ours."""
        if isinstance(error, UsageError):
            why = f": {error.message}"
        else:
            why = f": the workload fails with it ({brief(error)})"
        return self._broken.setdefault(_named(choices), why)

    def score(self, candidate: Candidate) -> ScoredCandidate:
        """Score a candidate by what its step takes within the budget."""
        lowest = self.lowest(candidate) + self.outside(candidate)
        solution = None
        if lowest <= self.request.limit:
            solution = self.solve(candidate, self.request.limit - self.outside(candidate), quick=True)
        seconds = candidate.step.seconds + (0.0 if solution is None else solution.extra_seconds)
        return ScoredCandidate(candidate=candidate, solution=solution, lowest=lowest, seconds=seconds)

    def lowest(self, candidate: Candidate) -> int:
        """The lowest predicted peak of a candidate's tensors, in bytes; or any within the budget, if that will do."""
        options = self.ilp_options(candidate)
        enough = 0 if self.request.objective == MEMORY else self.request.limit - self.outside(candidate)
        lowest = solver.lowest_peak(candidate.step, options, enough=enough)
        return max(lowest, candidate.profile.setup_bytes)

    def outside(self, candidate: Candidate) -> int:
        """Bytes beyond what its tensors hold by prediction: context, fragmentation, and the excess of earlier runs."""
        return candidate.outside + self.excess.get(key_of(candidate.choices, candidate.fine), 0)

    def solve(self, candidate: Candidate, budget: int, *, quick: bool = False) -> IlpSolution | None:
        """The cheapest decisions with which a candidate's tensors stay within a budget of bytes; None without any."""
        if candidate.profile.setup_bytes > budget:
            return None
        key = (key_of(candidate.choices, candidate.fine), budget, quick)
        if key not in self._solutions:
            self._solutions[key] = self._solved(candidate, budget, quick=quick)
        return self._solutions[key]

    def _solved(self, candidate: Candidate, budget: int, *, quick: bool) -> IlpSolution | None:
        options = self.ilp_options(candidate)
        if quick:
            options = replace(options, gap=_QUICK_GAP, time_limit=min(options.time_limit, _QUICK_SECONDS))
        left = self.clock.left
        if left is not None:
            options = replace(options, time_limit=min(options.time_limit, max(left, _LEAST_SECONDS)))
        found = solver.solve(candidate.step, budget, options)
        if found is not None:
            self.solver_seconds += found.seconds
        return found

    def ilp_options(self, candidate: Candidate) -> IlpOptions:
        """What may be chosen in a candidate."""
        return self._ilp_options(candidate.profile, candidate.step)

    def _ilp_options(self, profile: Profile, step: StepProfile) -> IlpOptions:
        checkpointing, offload = (self.request.may(find_technique(name)) for name in ACTIVATIONS)
        return IlpOptions(
            recompute=checkpointing,
            offload=offload and profile.device_type == "cuda",
            host_bytes=max(0, self.request.host_bytes - profile.host_peak_bytes) // PINNED_ROUNDING,
            link_bytes_per_second=profile.link_bytes_per_second,
            window=window_bytes(step),
            time_limit=self.request.time_limit,
        )

    def options(self, candidate: Candidate, *, quickening: bool = False) -> Iterator[Choice]:
        """What could be added to a candidate, the mildest settings first; `quickening`: only what may save time."""
        for choice in self._offers(candidate):
            technique, setting = choice.technique, choice.setting
            if quickening and not technique.quickens:
                continue
            if technique.promise(setting).numerics > self.request.numerics:
                continue  # before anything is tried
            settled = self.settled_choice(choice)
            if settled is not None:
                yield settled

    def settled_choice(self, choice: Choice) -> Choice | None:
        """A choice with what a trial found of cutting batches; None where that speaks against it."""
        setting = choice.setting
        if isinstance(setting, MicroBatchingSetting):
            known = self.micro_batching.setting
            if known is None:
                return None
            setting = replace(known, count=setting.count, batch_norm=setting.batch_norm)
            if choice.technique.promise(setting).numerics > self.request.numerics:
                return None
        if isinstance(setting, GradientCachingSetting):
            if not self.micro_batching.encoders:
                return None
            setting = replace(setting, modules=self.micro_batching.encoders)
        return replace(choice, setting=setting)

    def _offers(self, candidate: Candidate) -> tuple[Choice, ...]:
        """What techniques offer, whatever their numerics; micro-batching last, which first has to be tried."""
        able = [one for one in all_techniques() if one.name not in ACTIVATIONS and self.request.may(one)]
        techniques = sorted(
            (one for one in able if one.least <= self.request.numerics),
            key=lambda one: one.name == MICRO_BATCHING,
        )
        names, given = (
            [one.name for one in techniques],
            (candidate.choices, candidate.fine, self.request.sizes),
        )
        asked = self.request.host_bytes
        known = None if self.cache is None else self.cache.offers(*given, asked, names)
        if known is not None:
            return known
        profile = candidate.profile
        if is_remembered(profile):
            found, _ = self._profile_now(candidate.choices, candidate.fine)
            if found is None:
                return ()
            profile = replace(found, sizes=profile.sizes, step_seconds=profile.step_seconds)
            profile = replace(profile, step_flops=profile.step_flops, blocks=profile.blocks)
        if not profile.trains:
            profile = replace(profile, samples=self.samples)
        offers = tuple(
            Choice(technique=one, setting=setting) for one in techniques for setting in one.options(profile)
        )
        if self.cache is not None:
            self.cache.add_offers(*given, asked, names, offers)
        return offers

    @property
    def samples(self) -> WorkloadSamples:
        """Samples of the plain workload, for techniques that look at more than a profile."""
        if self._samples is None:
            profile = self.plain.profile
            self._samples = WorkloadSamples(
                workload=self.request.workload,
                sizes=self.request.sizes,
                flops=profile.step_flops,
                model_bytes=sum(4 * parameter.numel() for parameter in profile.model.parameters()),
                left=lambda: self.clock.left,
            )
        return self._samples

    @property
    def micro_batching(self) -> MicroBatchVerdict:
        """What is known of cutting the workload's batches."""
        if self.known_micro_batching is None:
            named = MICRO_BATCHING in (self.request.allowed or ())
            sizes, cache = self.request.sizes, self.cache
            self.known_micro_batching = self.kept.micro_batching
            if self.known_micro_batching is None and cache is not None:
                self.known_micro_batching = cache.micro_batching(sizes, by_name=named)
            if self.known_micro_batching is None:
                try:
                    self.known_micro_batching = self._try_micro_batching(by_name=named)
                except SearchStopped:
                    self.known_micro_batching = no_time_to_try(by_name=named)
                    raise
                if cache is not None and not self.known_micro_batching.over:
                    cache.add_micro_batching(sizes, self.known_micro_batching, by_name=named)
            if not self.known_micro_batching.over:
                self.kept.micro_batching = self.known_micro_batching
        return self.known_micro_batching

    def _try_micro_batching(self, *, by_name: bool) -> MicroBatchVerdict:
        workload = self.request.workload

        def probe() -> str:
            self.clock.check()
            return coupling_by_shapes(self.device, workload, self.request.sizes)

        self.clock.check()
        self.progress("whether batches can be cut")
        return try_micro_batching(
            workload, self.plain.profile, by_name=by_name, probe=probe, clock=self.clock
        )

    def notes(self, choices: Iterable[Choice]) -> tuple[str, ...]:
        """What a reader of a plan with these techniques should know, a sentence each."""
        cut = any(isinstance(choice.setting, MicroBatchingSetting) for choice in choices)
        known = self.known_micro_batching
        found = [f"{name} is left out{why}." for name, why in self._broken.items()]
        if known is not None and (cut or known.setting is None):
            found.append(known.note)
        return tuple(found)

    def cost(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        """Run choices with the budget as the device's memory, or without a limit where that does not do.

        Args:
            tail: seconds of the optimizer's step, which comes once, however many micro-batches there are.
        """
        key = key_of(choices)
        if key not in self._costs:
            try:
                self._costs[key] = self.cost_or_error(choices, tail)
            except Exception as error:
                if not choices:
                    raise
                self._note_broken(choices, error)
                self._costs[key] = self.unknown_cost()
        return self._costs[key]

    def cost_or_error(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        """The same, or whatever error the choices make of the workload."""
        request = self.request
        cost = self._run_cost(choices, tail, request.limit)
        if not cost.fits and cost.step_seconds == 0:
            cost = self.cost_without_limit(choices, tail)
            # It was seen not to fit, whatever it takes on a device that never has to give memory back.
            least = request.limit - cost.outside_bytes + 1
            return replace(cost, fits=False, peak_reserved_bytes=max(cost.peak_reserved_bytes, least))
        if cost.host_bytes > request.host_bytes and choices:
            return replace(cost, fits=False)
        return cost

    def unknown_cost(self) -> StepCost:
        """What a plan that cannot be run, or was not, is taken to cost: it saves nothing."""
        profile = self.plain.profile
        return StepCost(
            fits=False,
            peak_allocated_bytes=profile.peak_allocated_bytes,
            peak_reserved_bytes=max(
                profile.peak_reserved_bytes, self.request.limit - profile.outside_bytes + 1
            ),
            outside_bytes=profile.outside_bytes,
            step_seconds=profile.step_seconds,
            step_flops=profile.step_flops,
        )

    def cost_without_limit(self, choices: tuple[Choice, ...], tail: float) -> StepCost:
        """Run choices on a device that has as much memory as they take.

        Raises:
            SearchStopped: there is no time for it.
        """
        return self._run_cost(choices, tail, None)

    def _run_cost(self, choices: tuple[Choice, ...], tail: float, budget: int | None) -> StepCost:
        request, cache = self.request, self.cache
        if not cut_short(choices, request.sizes):
            tail = 0.0  # all that is planned is run: the same run whoever asks for it
        key = (key_of(choices), budget, tail)
        known = self.kept.costs.get(key)
        if known is None and cache is not None:
            known = cache.cost(choices, request.sizes, budget, tail)
        if known is not None:
            return known
        self.clock.check()
        self.kept.count += 1
        with self.clock.running():
            cost = step_cost_with(self.device, request.workload, choices, request.sizes, budget, tail=tail)
        self.kept.costs[key] = cost
        if cache is not None:
            cache.add_cost(choices, request.sizes, budget, tail, cost)
        return cost


def _named(choices: Iterable[Choice]) -> str:
    return " with ".join(choice.name for choice in choices)


def key_of(choices: Iterable[Choice], fine: bool = False) -> Key:
    """The key of a set of choices, in whatever order."""
    return (frozenset(map(choice_key, choices)), fine)


def choice_key(choice: Choice) -> tuple[str, str]:
    """The key of a choice."""
    return (choice.name, repr(setting_to_plain(choice.setting)))
