"""Compares a plan's gradients with the plain program's before the plan is written, as far as this machine can.

One batch is trained on for a few steps, plain and with the plan, on the CPU: with the model itself and the plan's own
batch where time and memory allow it, else with fewer examples, else with a stand-in of the same code (see
trial_attempts.py). Techniques are held to their own
promises: first those that promise equal bits, then with them those that round, then those of lower precision. Where one
does not keep its promise, it is found by itself, or by leaving it out, and the search is made again without it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.planner.comparing import Compared, ComparesItself
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.largest_size import search_for
from vramfit.planner.output_check import OutputCheck, compare_outputs, outputs_of
from vramfit.planner.plans import MEMORY, THROUGHPUT, NothingFits, Plan, PlanRequest
from vramfit.planner.promise_comparison import words_of_check, words_of_fault
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_cache import Runs, SearchCache
from vramfit.planner.search_clock import TIME_OVER, SearchClock, TimeOver, limited
from vramfit.planner.seeding import generators_kept
from vramfit.planner.state_check import differing_states, settled
from vramfit.planner.trial_attempts import TrialAttempt, most_model_bytes, ways_to_try
from vramfit.planner.verification import GradientCheck, Training, judge_gradients, with_states
from vramfit.planner.workload_check import brief
from vramfit.techniques import (
    Choice,
    Numerics,
    find_technique,
    setting_from_plain,
    setting_to_plain,
    with_choices,
)
from vramfit.techniques.gradient_caching import GradientCachingSetting
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.training_state.forward_state import Written
from vramfit.units import counted
from vramfit.workload import Workload

Progress = Callable[[str], None]

_EXAMPLES = 5
"""Examples in the smallest batch: two pieces of it are not equally large."""

_FEWER = 8
"""By how much the batch shrinks from one way to compare to the next."""

_BATCH_BYTES = 4 << 30
"""Bytes that a plain step may need on the CPU, by what it takes on the device."""

_STEPS = 3
"""Training steps: what an optimizer does shows in the losses after its first steps."""

_SECONDS = 30.0
"""Seconds that the comparison may take by its estimate, all in all."""

_LONGEST = 60.0
"""Seconds after which one way to compare is given up: machines are slower than its estimate, a stand-in has none."""

_RUNS = 4
"""Trainings of one comparison: plain, and with the techniques of each level."""

_PART, _MOST = 1 / 16, 1 << 29
"""The share of the machine's memory that a model's values may take, and the most bytes: a training holds five to nine
times as much, with the gradients of the other beside it."""

COMPILING = frozenset({"compile", "low-bit-optimizer"})
"""Techniques that compile code of their own for the CPU, which takes minutes and is not the card's."""


def check_promises(workload: Workload, plan: Plan, clock: SearchClock | None = None) -> Compared:
    """Compare a plan's gradients with the plain program's on this machine's CPU.

    Args:
        plan: with its sizes, and the FLOPs of a plain step.
        clock: of the search, whose limit the comparison keeps to.
    """
    clock = clock or SearchClock()
    if isinstance(workload, ComparesItself):
        return workload.check_promises(plan, clock)
    choices = tuple(choice for choice in plan.choices if choice.name not in COMPILING)
    skipped = " and ".join(choice.name for choice in plan.choices if choice.name in COMPILING)
    left = (
        f"{skipped} was not compared: it compiles for the CPU; vramfit verify compares it." if skipped else ""
    )
    if not choices:
        return Compared(note=left)
    found = (
        _compared(workload, plan, choices, clock)
        if workload.trains
        else _outputs_compared(workload, plan, choices, clock)
    )
    return replace(found, note=f"{found.note} {left}".strip())


def _compared(workload: Workload, plan: Plan, choices: Sequence[Choice], clock: SearchClock) -> Compared:
    """The comparison of some of a plan's techniques."""
    shapes, sizes = _shapes(workload), plan.aim.sizes or workload.sizes
    paths = frozenset(path for path, _ in shapes.named_modules())
    why = "the model is too large for it here"
    for way in _ways(workload, plan, _bytes_of(shapes)):
        comparison = _Comparison(workload, way, paths, sizes[batch_size_name(sizes)])
        try:
            with limited(clock, _LONGEST, part=1.0):
                found = comparison.of(choices)
            if isinstance(found, _Broken):
                return _blamed(comparison, found, clock)
            return found
        except _NothingToCompareError as error:
            why = error.message
            break
        except TimeOver:
            why = "the time was over"
        except KeyboardInterrupt:
            why = "that was interrupted"
            break
        except Exception as error:  # whatever the workload's code makes of the CPU, or of smaller sizes
            why = f"that fails with {way.words} ({brief(error)})"
    return Compared(
        note=f"The plan's gradients were not compared with the plain program's, since {why}: vramfit verify compares "
        "them where there is more room."
    )


def _blamed(comparison: _Comparison, broken: _Broken, clock: SearchClock) -> Compared:
    """Whose fault it is, however long that takes; where a search has no time for it, what promises least.

    Raises:
        _NothingToCompareError: nothing can be compared with the plain program.
    """
    try:
        with limited(clock, math.inf, part=1.0):
            return comparison.blamed(broken)
    except TimeOver:
        return comparison.suspected(broken)


def _shapes(workload: Workload) -> nn.Module:
    """The workload's model, without values where it can be made so."""
    try:
        with torch.device("meta"):
            return workload.model()
    except Exception:  # it reads its own values while it is made, as models do that are not large
        return workload.model()


def _bytes_of(model: nn.Module) -> int:
    """Of a model's parameters in 32 bits."""
    return sum(4 * parameter.numel() for parameter in model.parameters())


def _outputs_compared(
    workload: Workload, plan: Plan, choices: Sequence[Choice], clock: SearchClock
) -> Compared:
    """The comparison of the outputs of inference, with the model itself: a stand-in has other receptive fields."""
    name = batch_size_name(plan.aim.sizes)
    why = "the model is too large for it here"
    for way in ways_to_try(
        workload,
        {**plan.aim.sizes, name: min(2, plan.aim.sizes[name])},
        flops=plan.before.step_flops * 2,
        seconds=_SECONDS,
        model_bytes=_bytes_of(_shapes(workload)),
        most_bytes=most_model_bytes(_PART, _MOST),
    ):
        if way.model is not None:
            continue
        try:
            with limited(clock, _LONGEST, part=1.0):
                return _judged_outputs(workload, choices, way)
        except TimeOver:
            why = "the time was over"
        except KeyboardInterrupt:
            why = "that was interrupted"
            break
        except Exception as error:  # whatever the workload's code makes of the CPU, or of smaller sizes
            why = f"that fails with {way.words} ({brief(error)})"
    return Compared(
        note=f"The plan's outputs were not compared with the plain program's, since {why}: vramfit verify compares "
        "them where there is more room."
    )


def _judged_outputs(workload: Workload, choices: Sequence[Choice], way: TrialAttempt) -> Compared:
    """Outputs with the techniques beside the plain ones; where they are not as promised, whose fault it is."""
    plain = outputs_of(workload, way.sizes)

    def judged(some: Sequence[Choice]) -> OutputCheck:
        level = max(choice.promise.numerics for choice in some)
        return compare_outputs(workload, with_choices(workload, tuple(some)), way.sizes, level, plain)

    check = judged(choices)
    if check.passes:
        how = "are those of the plain program, bit for bit"
        if check.equal < check.outputs:
            bound = "which nothing bounds" if check.allowed is None else f"{check.allowed:g} promised"
            how = f"differ by at most {check.worst:.2g} of their norm, {bound}"
        return Compared(note=f"compared with {way.words}: the outputs {how}.", by=way.words)
    fault = next((choice for choice in choices if not judged([choice]).passes), choices[-1])
    return Compared(
        note=f"{fault.name} is left out: compared with {way.words}, an output differs by {check.worst:.2g} of its "
        f"norm, and {fault.promise.numerics.value} was promised.",
        fault=fault,
    )


@dataclass(frozen=True, slots=True)
class _Broken:
    """Techniques that do not keep the promise of a level together."""

    choices: Sequence[Choice]
    level: Numerics
    check: GradientCheck


class _NothingToCompareError(UsageError):
    """Nothing can be compared with the plain program: its loss is not finite, or differs from run to run."""


def _ways(workload: Workload, plan: Plan, model_bytes: int) -> list[TrialAttempt]:
    """Ways to compare: with the plan's own batch, with fewer examples, and in the end by a stand-in."""
    sizes = dict(plan.aim.sizes) or dict(workload.sizes)
    name = batch_size_name(sizes)
    own = sizes[name]

    def ways(examples: int) -> list[TrialAttempt]:
        return list(
            ways_to_try(
                workload,
                {**sizes, name: examples},
                flops=plan.before.step_flops * examples / own * _STEPS * _RUNS,
                seconds=_SECONDS,
                model_bytes=model_bytes,
                most_bytes=most_model_bytes(_PART, _MOST),
            )
        )

    *larger, least = _batches(own)
    found: list[TrialAttempt] = []
    for examples in larger:
        if plan.before.peak_allocated_bytes * examples / own <= _BATCH_BYTES:
            itself = {**sizes, name: examples}
            found += [way for way in ways(examples) if way.model is None and way.sizes == itself]
    found += ways(least)
    if larger:  # for batch functions that make batches of one size alone
        found += [way for way in ways(own) if way not in found]
    return found


def _batches(own: int) -> Iterator[int]:
    """The plan's own number of examples, then fewer and fewer."""
    examples = own
    while examples > _EXAMPLES:
        yield examples
        examples //= _FEWER
    yield min(_EXAMPLES, own)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """Gradients of the first step, by parameter, and the losses of all."""

    gradients: Mapping[str, torch.Tensor]
    written: Mapping[str, Written]
    """What the first step wrote beside them."""
    losses: tuple[float, ...]
    dtypes: Mapping[str, torch.dtype]


class _Comparison:
    """Trainings of a workload in one way, with this or that technique."""

    def __init__(
        self, workload: Workload, way: TrialAttempt, paths: frozenset[str], planned_batch: int
    ) -> None:
        self._way, self._paths = way, paths
        self._planned_batch = planned_batch
        self._workload = workload if way.model is None else replace(workload, model=_copies(way.model))
        self._own = workload
        self._plain: dict[bool, _Trained] = {}

    def of(self, choices: Sequence[Choice]) -> Compared | _Broken:
        """Hold techniques to their promises, each level with those before it.

        Raises:
            _NothingToCompareError: nothing can be compared with the plain program.
        """
        check: GradientCheck | None = None
        for level in sorted({choice.promise.numerics for choice in choices}):
            if level is Numerics.APPROXIMATE and check is not None:
                break
            held = [choice for choice in choices if choice.promise.numerics <= level]
            found, losses = self._judged(held, level)
            if not (found.passes and losses):
                return _Broken(held, level, found)
            check = found
        if check is None or not check.parameters:
            return Compared()
        return Compared(note=words_of_check(check, self._words_of_way), by=self._words_of_way)

    def _judged(self, choices: Sequence[Choice], level: Numerics) -> tuple[GradientCheck, bool]:
        """The gradients beside the plain program's, and whether the losses are equal where they have to be."""
        cut = any(choice.technique.redraws for choice in choices)
        plain = self._without(cut=cut)
        planned = self._trained(choices, cut=cut)
        check = judge_gradients(plain.gradients, planned.gradients, level, plain.dtypes)
        off = settled(
            self._workload, self._way.sizes, differing_states(plain.written, planned.written, level)
        )
        check = with_states(check, len(plain.written), off)
        return check, level is not Numerics.BITWISE or plain.losses == planned.losses

    def blamed(self, broken: _Broken) -> Compared:
        """Which of the techniques does not keep its promise.

        Raises:
            _NothingToCompareError: nothing can be compared with the plain program.
        """
        choices, level = broken.choices, broken.level
        self._check_measure()
        fault = self._alone(choices) or self._left_out(choices, level) or choices[-1]
        return Compared(note=f"{words_of_fault(fault, broken.check, self._words_of_way)}.", fault=fault)

    def suspected(self, broken: _Broken) -> Compared:
        """The technique that promises least of those that break a promise together."""
        fault = max(broken.choices, key=lambda choice: choice.promise.numerics)
        alone = "" if len(broken.choices) == 1 else "; there was no time to find out whose fault it is"
        return Compared(
            note=f"{words_of_fault(fault, broken.check, self._words_of_way)}{alone}.", fault=fault
        )

    def _alone(self, choices: Sequence[Choice]) -> Choice | None:
        for choice in choices:
            try:
                check, losses = self._judged([choice], choice.promise.numerics)
            except Exception:  # some do not run without others
                continue
            if not (check.passes and losses):
                return choice
        return None

    def _left_out(self, choices: Sequence[Choice], level: Numerics) -> Choice | None:
        for choice in choices:
            rest = [other for other in choices if other is not choice]
            try:
                check, losses = self._judged(rest, level)
            except Exception:  # what fails without it does not say whose fault it was
                continue
            if rest and check.passes and losses:
                return choice
        return None

    def _check_measure(self) -> None:
        """Make sure that two runs of the plain program agree: nothing can be compared with it otherwise."""
        first, second = self._without(cut=False), self._trained((), cut=False)
        check = judge_gradients(first.gradients, second.gradients, Numerics.BITWISE, first.dtypes)
        if not check.passes:
            raise _NothingToCompareError("two runs of the plain program from one seed differ", "")

    def _without(self, *, cut: bool) -> _Trained:
        """The plain program, without dropout where micro-batches would draw otherwise."""
        if cut not in self._plain:
            found = self._trained((), cut=cut)
            if not all(math.isfinite(loss) for loss in found.losses):
                raise _NothingToCompareError(f"the plain program's loss is {found.losses[-1]}", "")
            self._plain[cut] = found
        return self._plain[cut]

    def _trained(self, choices: Sequence[Choice], *, cut: bool) -> _Trained:
        with generators_kept():
            return self._steps(choices, cut=cut)

    def _steps(self, choices: Sequence[Choice], *, cut: bool) -> _Trained:
        workload = self._workload
        if choices:
            workload = with_choices(workload, tuple(self._fitted(choice) for choice in choices))
        with closing(Training(workload, self._way.sizes, random=not cut)) as training:
            dtypes = {name: one.dtype for name, one in training.state.model.named_parameters()}
            gradients = training.gradients()
            for number in range(1, _STEPS):
                training.step(number)
            written = training.written
            return _Trained(
                gradients=gradients, written=written, losses=tuple(training.losses), dtypes=dtypes
            )

    def _fitted(self, choice: Choice) -> Choice:
        """A choice for what is tried: pieces of this batch, and modules that a stand-in has."""
        setting = choice.setting
        if isinstance(setting, MicroBatchingSetting | GradientCachingSetting):
            setting = replace(setting, count=self._pieces(setting.count))
            choice = replace(choice, setting=setting)
        if self._way.model is None:
            return choice
        model = self._workload.model()
        there = frozenset(path for path, _ in model.named_modules())
        plain = _renamed(setting_to_plain(setting), lambda path: self._name(path, there))
        return replace(choice, setting=setting_from_plain(choice.technique, plain))

    def _pieces(self, planned: int) -> int:
        """Pieces of this batch, as large as the plan's where that makes two at least."""
        name = batch_size_name(self._own.sizes)
        piece = math.ceil(self._planned_batch / planned)
        return min(planned, max(2, math.ceil(self._way.sizes[name] / piece)))

    def _name(self, path: str, there: frozenset[str]) -> str | None:
        """What stands in for a module: itself, or the layer that took its place; None where there is none."""
        if path not in self._paths:
            module, _, attribute = path.rpartition(".")
            if module not in self._paths or module in there:
                return path
            owner = self._name(module, there)  # a buffer or an attribute of a module
            return None if owner is None else f"{owner}.{attribute}"
        if path in there:
            return path
        parts = path.split(".")
        for place, part in enumerate(parts):
            head = parts[:place]
            if part.isdecimal() and ".".join((*head, part)) not in there:
                count = sum(".".join((*head, str(number))) in there for number in range(int(part)))
                if not count:
                    return None
                parts[place] = str(int(part) % count)
        name = ".".join(parts)
        return name if name in there else None

    @property
    def _words_of_way(self) -> str:
        """What was trained, and with how many examples."""
        return (
            f"{self._way.words} and {counted(self._way.sizes[batch_size_name(self._own.sizes)], 'example')}"
        )


def _copies(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes the same model each time: a stand-in's values are drawn once."""
    made: list[nn.Module] = []

    def copied() -> nn.Module:
        if not made:
            made.append(make())
        return copy.deepcopy(made[0])

    return copied


def _renamed(value: Any, name: Callable[[str], str | None]) -> Any:
    """Plain values with names of modules translated; those that have none are left out, and no name is there twice."""
    if isinstance(value, Mapping):
        pairs = ((name(key), _renamed(one, name)) for key, one in value.items())
        return {key: one for key, one in pairs if key is not None}
    if isinstance(value, list):
        found = (name(one) if isinstance(one, str) else _renamed(one, name) for one in value)
        kept = [one for one in found if one is not None]
        return list(dict.fromkeys(kept)) if all(isinstance(one, str) for one in kept) else kept
    return value


def _shares_memory_with_host(device: DeviceBackend) -> bool:
    """Whether it is a virtual card of a kind whose memory is the host's."""
    spec: GpuSpec | None = getattr(device, "spec", None)
    return spec is not None and spec.integrated


_OFFLOADS = ("activation-offload", "optimizer-offload", "parameter-offload")
"""Techniques that move tensors to the memory of the host."""


def promised_plan(
    device: DeviceBackend,
    request: PlanRequest,
    progress: Callable[[str], None],
    clock: SearchClock | None = None,
    cache: SearchCache | None = None,
    kept: Runs | None = None,
) -> tuple[PlanSearch, Plan]:
    """The best plan for a request, with the search that found it; its notes say what was compared.

    A technique whose gradients are not what it promises is left out, and the search made again without it: what was run
    before is not run again.

    Args:
        kept: runs of other searches of this process for the same workload, sizes and card.

    Raises:
        NothingFits: none stays within the budget; its plan's notes say what was left out.
        UsageError: the workload cannot be run, or the objective is none.
    """
    clock = clock or SearchClock(limit=request.search_seconds)
    notes: tuple[str, ...] = ()
    kept = Runs() if kept is None else kept
    if _shares_memory_with_host(device):
        offloads = {technique.name for technique in map(find_technique, _OFFLOADS) if request.may(technique)}
        request = replace(request, forbidden=request.forbidden | offloads)
        if offloads:
            notes = (
                f"{device.name} shares its memory with the host: nothing is offloaded, for it would free none.",
            )
    while True:
        clock.kept_back = _kept_back(clock)
        clock.go_on()
        try:
            search, found = search_for(device, request, progress, clock, cache, kept)
        except NothingFits as error:
            plan = replace(error.plan, notes=(*error.plan.notes, *notes))
            raise NothingFits(error.message, error.hint, plan) from None
        compared = _compared_in_time(request, found, progress, clock)
        if compared.fault is None:
            if request.objective in (THROUGHPUT, MEMORY):
                found, compared = _with_time_left(search, request, (found, compared), progress, clock)
            told = (*notes, compared.note) if compared.note else notes
            return search, replace(found, notes=(*found.notes, *told), compared=compared.by)
        notes = (*notes, compared.note)
        request = replace(request, forbidden=request.forbidden | {compared.fault.name})


_FOR_COMPARISON = 0.25
"""Part of a limited search's seconds that are kept for the comparison of its plan, at most."""


def _kept_back(clock: SearchClock) -> float:
    """Seconds of a search that are kept for the comparison of its plan."""
    return 0.0 if clock.limit is None else min(_LONGEST, _FOR_COMPARISON * clock.limit)


def _compared_in_time(request: PlanRequest, plan: Plan, progress: Progress, clock: SearchClock) -> Compared:
    """The comparison of a plan with all the time that is left of its search, which is then known to be needed again."""
    progress("the plan's gradients beside the plain program's")
    began, clock.kept_back = clock.seconds, 0.0
    compared = check_promises(request.workload, plan, clock)
    clock.kept_back = clock.seconds - began
    return compared


def _with_time_left(
    search: PlanSearch,
    request: PlanRequest,
    best: tuple[Plan, Compared],
    progress: Progress,
    clock: SearchClock,
) -> tuple[Plan, Compared]:
    """A search that was cut short goes on in the time that the comparison of its plan left over.

    What it comes to is taken where it keeps its promises, too, and was compared if the plan before it was.
    """
    found, compared = best
    if found.solved.stopped != TIME_OVER or not (clock.left or 0.0) > clock.longest:
        return best
    clock.go_on()
    better = search.plan()
    if better.choices == found.choices:
        return better, compared
    again = _compared_in_time(request, better, progress, clock)
    if again.fault is not None or (compared.by and not again.by):
        return best
    return better, again
