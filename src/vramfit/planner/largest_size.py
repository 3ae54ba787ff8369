"""The largest size of a workload that fits a device: a run for each try.

It is looked for on the virtual GPU, where a try takes a second, and confirmed on the card where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vramfit.errors import UsageError
from vramfit.planner.candidates import ACTIVATIONS, Candidates
from vramfit.planner.devices.cost import DeviceBackend, StepCost
from vramfit.planner.micro_batch_trial import MicroBatchVerdict
from vramfit.planner.planner_job import PRICE
from vramfit.planner.plans import MEMORY, THROUGHPUT, NothingFits, Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_cache import Runs, SearchCache
from vramfit.planner.search_clock import TIME_OVER, SearchClock, SearchStopped
from vramfit.planner.workload_check import brief
from vramfit.searching.largest import Largest, LargestSearch, Strategy, doubled_from, down_from
from vramfit.searching.orders import first_of
from vramfit.searching.tries import Tries
from vramfit.techniques import with_choices
from vramfit.techniques.micro_batching import batch_size_name
from vramfit.units import format_bytes
from vramfit.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """One run.

    Attributes:
        total_bytes: of the device, as far as it came.
        step_seconds: estimated, on a card measured; 0 where it did not fit.
    """

    value: int
    fits: bool
    total_bytes: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CardCheck:
    """What a card said of the largest value that was found on the virtual GPU.

    Attributes:
        card: its name, as torch gives it.
        value: the largest that fits there, of those up to the one that was found; 0 if none does.
        failing: the smallest that did not fit there; 0 if the one that was found fits.
        tries: all runs on it, in order.
        left_bytes: of tensors that outlived their run; more than 0 is the workload's own doing.
        skipped: why nothing was run on it; empty where something was.
    """

    card: str
    value: int = 0
    failing: int = 0
    tries: tuple[Try, ...] = ()
    left_bytes: int = 0
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestSize:
    """The largest value of a size that fits.

    Attributes:
        usual: the workload's own value.
        value: the largest that fits; 0 if not even 1 does.
        failing: the smallest that was seen not to fit; 0 if all tried did.
        total_bytes: that `value` takes of the device.
        limit_bytes: that it may take.
        step_seconds: of a step at `value`, estimated.
        tries: all runs, in order; none of those on a card.
        least_bytes: what 1 would take of a device without end, where not even that fits; else 0.
        predicted: what the virtual GPU says is the largest; another value than `value` if a card disagreed.
        failure: what went wrong at the smallest value above the usual one at which the workload itself failed; empty
            if it never did. Such a value does not fit.
        card: what the card said; None where it was not asked. `value`, `total_bytes` and `step_seconds` are its own
            then.
    """

    size: str
    usual: int
    value: int
    failing: int
    total_bytes: int
    limit_bytes: int
    step_seconds: float
    tries: tuple[Try, ...]
    least_bytes: int = 0
    predicted: int = 0
    card: CardCheck | None = None
    failure: str = ""

    def __repr__(self) -> str:
        taken = f"{format_bytes(self.total_bytes)} of {format_bytes(self.limit_bytes)}"
        return f"<Largest {self.size}: {self.value:,} (usually {self.usual:,}), {taken}>"


@dataclass(slots=True)
class SizeSearch:
    """The search for the largest value of one size: each try is a run with a fresh model, each value runs once.

    Args:
        sizes: of the batch; that of `name` is where the search begins.
        host_limit: bytes that techniques may take of the host; None for any.
        clock: decides whether another run may begin.

    Attributes:
        failures: what went wrong at values above the first at which the workload itself failed, by value: models end
            somewhere. Such a value does not fit.
    """

    device: DeviceBackend
    workload: Workload
    sizes: Mapping[str, int]
    name: str
    limit: int
    progress: Callable[[str], None] = lambda _text: None
    host_limit: int | None = None
    clock: SearchClock = field(default_factory=SearchClock)
    failures: dict[int, str] = field(default_factory=dict)
    _tries: Tries[int, StepCost] = field(init=False)

    def __post_init__(self) -> None:
        """Remember each run."""
        self._tries = Tries(
            self._cost,
            progress=lambda value: self.progress(f"{self.name} {value:,}"),
            check=self.clock.check,
            failed=self._failed,
        )

    def largest(self) -> LargestSize:
        """The largest value with which a step stays within the limit.

        The value is doubled, or halved, until one fits and the next does not; then the interval is halved down to
        neighbours.
        """
        largest = self.by(doubled_from(self.sizes[self.name], CEILING))
        best = largest.answer
        failing = min(self.failures, default=0)
        alone = 0
        if not largest.value:
            alone = self.device.step_cost(self.workload, self._sizes_at(1), None).total_bytes
        return LargestSize(
            size=self.name,
            usual=self.sizes[self.name],
            value=largest.value,
            failing=largest.failing,
            total_bytes=0 if best is None else best.total_bytes,
            limit_bytes=self.limit,
            step_seconds=0.0 if best is None else best.step_seconds,
            tries=_runs(largest),
            least_bytes=alone,
            predicted=largest.value,
            failure=f"{self.name} {failing:,} fails: {self.failures[failing]}" if failing else "",
        )

    def largest_up_to(self) -> tuple[int, int, tuple[Try, ...]]:
        """The largest value that fits of those up to the first, the smallest that did not (0: none), and the runs.

        The first is tried first. Where it does not fit, steps down double until one does: predictions are near, and
        runs on a card are expensive.
        """
        largest = self.by(down_from(self.sizes[self.name]))
        return largest.value, largest.failing, _runs(largest)

    def by(self, strategy: Strategy) -> Largest[StepCost]:
        """The largest value with which a step stays within the limit, looked for in one's own way."""
        return LargestSearch(self._tries, self._fits, strategy).run()

    def _fits(self, cost: StepCost) -> bool:
        return cost.fits and (self.host_limit is None or cost.host_bytes <= self.host_limit)

    def _cost(self, value: int) -> StepCost:
        with self.clock.running():
            return self.device.step_cost(self.workload, self._sizes_at(value), self.limit)

    def _failed(self, value: int, error: Exception) -> StepCost | None:
        if value <= self.sizes[self.name]:
            return None
        self.failures[value] = brief(error)  # a table of positions that ends, a check of the model's own
        return StepCost(fits=False, peak_allocated_bytes=0, peak_reserved_bytes=0)

    def _sizes_at(self, value: int) -> dict[str, int]:
        return {**self.sizes, self.name: value}


def _runs(largest: Largest[StepCost]) -> tuple[Try, ...]:
    return tuple(
        Try(
            value=tried.value,
            fits=tried.fits,
            total_bytes=tried.answer.total_bytes,
            step_seconds=tried.answer.step_seconds,
        )
        for tried in largest.tries
    )


def with_card(found: LargestSize, check: CardCheck) -> LargestSize:
    """What was found on the virtual GPU, with what the card said in its place."""
    if check.skipped:
        return replace(found, card=check)
    best = next((one for one in check.tries if one.value == check.value), None)
    return replace(
        found,
        value=check.value,
        failing=check.failing or found.failing,
        total_bytes=0 if best is None else best.total_bytes,
        step_seconds=0.0 if best is None else best.step_seconds,
        card=check,
    )


CEILING = 1 << 24
"""No number above this is tried."""


Progress = Callable[[str], None]

_ALIASES = ("batch", "sequence")

_CLOSE = 64
"""The largest size is looked for up to this part of it."""

_GROWTHS = 4
"""Times that a plan for the largest size is tried at larger ones."""


def search_for(
    device: DeviceBackend,
    request: PlanRequest,
    progress: Progress,
    clock: SearchClock | None = None,
    cache: SearchCache | None = None,
    kept: Runs | None = None,
) -> tuple[PlanSearch, Plan]:
    """The best plan for a request, with the search that found it.

    Where the objective is a size, the plan of the lowest peak at the workload's own size is looked for first; with that
    the size is doubled and bisected, a run each, and the quickest plan at the largest is taken. Micro-batching is
    forbidden where the size is the batch's: with it there is no largest.

    Args:
        clock: of this search, and of others for the same answer.
        cache: of earlier searches; None without one.
        kept: what others ran for the same request, or one that allows more; not for sizes that grow, where the plan of
            the lowest peak decides what is run.

    Raises:
        NothingFits: none stays within the budget.
        UsageError: the workload cannot be run, or the objective is none.
    """
    clock = clock or SearchClock(limit=request.search_seconds)
    if request.objective in (THROUGHPUT, MEMORY):
        candidates = Candidates(
            device=device, request=request, progress=progress, clock=clock, cache=cache, kept=kept or Runs()
        )
        search = PlanSearch(candidates)
        return search, search.plan()
    name = grown_size(request)
    forbidden = request.forbidden
    if name == batch_size_name(request.sizes):
        forbidden |= {"micro-batching"}
    growing = _Growing(
        device=device,
        request=replace(request, objective=name, forbidden=forbidden),
        name=name,
        clock=clock,
        cache=cache,
        progress=progress,
    )
    return growing.found()


@dataclass(slots=True)
class _Growing:
    """The search for the largest value of a size, and the plan for it."""

    device: DeviceBackend
    request: PlanRequest
    name: str
    clock: SearchClock
    cache: SearchCache | None
    progress: Progress
    best: tuple[PlanSearch, Plan] | None = None
    closest: NothingFits | None = None
    failures: dict[int, str] = field(default_factory=dict)

    def found(self) -> tuple[PlanSearch, Plan]:
        """The plan for the largest size; where the search is stopped, for the largest so far.

        Raises:
            NothingFits: none stays within the budget.
            KeyboardInterrupt: the search was interrupted before there was any plan.
        """
        try:
            self._grow()
        except SearchStopped:
            if self.best is None and self.clock.stopped == TIME_OVER and self.closest is not None:
                raise self.closest from None
            if self.best is None:
                raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.clock.interrupt()
        assert self.best is not None
        search, plan = self.best
        if self.clock.stopped:
            plan = self._short(plan)
        if self.failures:
            least = min(self.failures)
            note = f"{self.name} {least:,} is too large for the workload itself ({self.failures[least]})."
            plan = replace(plan, notes=(*plan.notes, note))
        return search, plan

    def _short(self, plan: Plan) -> Plan:
        note = f"The search was stopped: a larger {self.name} than {plan.aim.sizes[self.name]:,} may fit."
        return replace(
            plan,
            aim=replace(plan.aim, objective=self.name),
            solved=replace(plan.solved, stopped=self.clock.stopped),
            notes=(note, *plan.notes),
        )

    def _grow(self) -> None:
        request, name = self.request, self.name
        smallest = replace(request, objective=MEMORY, entries=False, recipes=False)
        first = PlanSearch(self._candidates(smallest))
        try:
            lean = first.plan()
            self.best = first, lean
        except NothingFits as error:
            if self.clock.stopped:
                raise
            lean = error.plan
            self.closest = error
        largest = max(1, self._largest(request.sizes[name], lean))
        known = first.candidates.known_micro_batching
        planned = first_of(
            _downwards(largest),
            lambda size: self._planned(size, lean, known),
            lambda plan: bool(self.clock.stopped) or not isinstance(plan, NothingFits),
        )
        if isinstance(planned.answer, NothingFits):
            if self.clock.stopped and self.best is not None:
                return
            raise planned.answer
        value, self.best = planned.candidate, planned.answer
        for _ in range(_GROWTHS):
            # The lowest peak may be more fragmented than a higher one: each plan has a largest size of its own.
            larger = self._largest(value, self.best[1])
            if larger <= value:
                break
            better = self._planned(larger, self.best[1], known)
            if isinstance(better, NothingFits):
                break
            value, self.best = larger, better

    def _candidates(
        self, request: PlanRequest, micro_batching: MicroBatchVerdict | None = None
    ) -> Candidates:
        return Candidates(
            device=self.device,
            request=request,
            progress=self.progress,
            known_micro_batching=micro_batching,
            clock=self.clock,
            cache=self.cache,
        )

    def _largest(self, start: int, plan: Plan) -> int:
        """The largest size at which a plan fits; 0 without one."""
        search = SizeSearch(
            self.device,
            with_choices(self.request.workload, plan.choices),
            self.request.sizes,
            self.name,
            self.request.limit,
            self.progress,
            host_limit=self.request.host_bytes if plan.entries else None,
            clock=self.clock,
            failures=self.failures,
        )
        return search.by(doubled_from(start, CEILING, closer=max(1, start // _CLOSE))).value

    def _planned(
        self, value: int, like: Plan, micro_batching: MicroBatchVerdict | None
    ) -> tuple[PlanSearch, Plan] | NothingFits:
        """The best plan at a size, with another one's to begin with; or that there is none."""
        asked = replace(self.request, sizes={**self.request.sizes, self.name: max(1, value)})
        search = PlanSearch(
            self._candidates(asked, micro_batching),
            start=tuple(choice for choice in like.choices if choice.name not in ACTIVATIONS),
        )
        try:
            return search, search.plan()
        except NothingFits as error:
            return error


def _downwards(value: int) -> Iterator[int]:
    """A value and smaller ones down to 1, by steps that double."""
    step = 1
    while value > 1:
        yield value
        value, step = max(1, min(value - 1, value - value * step // _CLOSE)), 2 * step
    yield value


def grown_size(request: PlanRequest) -> str:
    """The size that an objective names: by its own name, or ``batch`` or ``sequence`` for the one that it must be.

    Raises:
        UsageError: it names none.
    """
    objective, sizes = request.objective, request.sizes
    if objective in sizes:
        return objective
    if objective == "batch":
        return batch_size_name(sizes)
    if objective == "sequence":
        found = [name for name in sizes if "seq" in name or "length" in name]
        if len(found) == 1:
            return found[0]
    known = ", ".join((THROUGHPUT, MEMORY, PRICE, *_ALIASES, *sizes))
    raise UsageError(f"{objective!r} is no objective of this workload", f"Give one of {known}")
