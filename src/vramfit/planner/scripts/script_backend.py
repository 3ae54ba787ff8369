"""Runs a program with techniques on a virtual card, in this process: the device of a search for a program's plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vramfit.attaching.attached_script import STARTING, AttachedScript, TrainedTarget
from vramfit.capture.observing.program_observer import observe_program
from vramfit.errors import UsageError, VramfitError
from vramfit.options.run_options import RunOptions
from vramfit.patching import PatchStack
from vramfit.planner.comparing import Compared
from vramfit.planner.devices.cost import StepCost, profile_of
from vramfit.planner.devices.same_start import between_steps, same_start
from vramfit.planner.devices.virtual_backend import VirtualMeter, WatchedStep, categories_of, watched_step
from vramfit.planner.plans import Plan
from vramfit.planner.remedies.alteration import NOTHING, Alteration, Effects
from vramfit.planner.remedies.batch_change import batch_alteration, batch_size
from vramfit.planner.scripts.script_place import run_here
from vramfit.planner.scripts.script_steps import ScriptSteps
from vramfit.planner.scripts.script_workload import ScriptWorkload, choices_of, script_of, script_workload
from vramfit.planner.search_clock import SearchClock
from vramfit.planner.step_profiler import StepProfile, StepProfiler
from vramfit.planner.workload_check import brief
from vramfit.techniques import Profile
from vramfit.trace import Run
from vramfit.trace.observed_program import ObservedProgram
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import State, Workload

STEPS = 2
"""Steps of a run: the second has the optimizer's state."""

_ENDLESS = 1 << 44
"""Memory of a card that never runs out."""


@dataclass(slots=True)
class ScriptRun:
    """One run of the program.

    Attributes:
        run: what happened on the card.
        seen: what the program was seen to train.
        model: its model, with the techniques attached while it ran; None where none was trained.
        optimizer: the program's own.
        steps: that it took.
        host_bytes: most bytes that were taken of the host.
        failed: whether the card was too small.
        setup_bytes: most bytes that tensors held before the first training pass.
    """

    run: Run
    seen: ObservedProgram
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    steps: int
    host_bytes: int
    failed: bool
    setup_bytes: int


@dataclass(slots=True)
class _Watch:
    """What is done at the borders of a run's steps.

    Attributes:
        step: figures of the last step.
    """

    gpu: VirtualGPU
    step: WatchedStep = field(default_factory=WatchedStep)
    profiler: StepProfiler | None = None
    around: ExitStack = field(default_factory=ExitStack)

    def begin(self, model: nn.Module | None, places: Callable[[nn.Module], Sequence[str]] | None) -> None:
        """Watch from here on."""
        if places is not None and model is not None:
            self.profiler = StepProfiler(model, places(model), VirtualMeter(self.gpu))
            self.around.enter_context(self.profiler.watching())
        else:
            self.step = self.around.enter_context(watched_step(self.gpu))

    def end(self) -> None:
        """The step is over."""
        self.around.close()


class ScriptBackend:
    """A virtual card on which a program is run with techniques; see `DeviceBackend`.

    Args:
        options: how the program is run, with its card.
        command: what python is given.

    Attributes:
        seen: the first look at the program; None before it.
    """

    device_type = "cuda"

    def __init__(self, options: RunOptions, command: Sequence[str], *, host_bytes: int = 0) -> None:
        self.spec = options.card
        self.name = self.spec.name
        self.total_bytes = self.spec.total_bytes
        self.host_bytes = host_bytes
        self.seen: ScriptRun | None = None
        self._options = replace(options, gpus=1)
        self._command = tuple(command)
        self._target: TrainedTarget | None = None

    def workload(
        self, compare: Callable[[ScriptWorkload, Plan, SearchClock], Compared], *, trained: bool = True
    ) -> ScriptWorkload:
        """The program as a workload: the plain program is run for a step on an endless card.

        Args:
            compare: compares a plan's gradients with the plain program's.
            trained: whether it has to train a model; otherwise one that runs some will do.

        Raises:
            UsageError: it trains no model that techniques can be attached to.
            VramfitError: the program fails.
        """
        found = self.seen = self.look(NOTHING)
        self._target = found_target(found.seen, trained=trained)
        return script_workload(self._command, self._target, found.seen, compare)

    def look(self, alteration: Alteration = NOTHING) -> ScriptRun:
        """What the program trains, as its first step on an endless card shows.

        Raises:
            VramfitError: the program fails.
        """
        return self._run(alteration, None, steps=1, places=None)

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run two steps on a card of `budget` bytes, or on an endless one; see `DeviceBackend.step_cost`.

        Raises:
            VramfitError: the program failed for another reason than memory.
        """
        script = script_of(workload)
        changed = NOTHING
        for name, value in sizes.items():
            if value != script.sizes[name]:
                changed += self._with_size(script, value)
        return self.altered_cost(changed + Alteration(choices=choices_of(workload)), budget)

    def _with_size(self, script: ScriptWorkload, value: int) -> Alteration:
        """The program with another value of its size.

        Raises:
            UsageError: nothing says where its batch size is set.
        """
        if script.option:
            return Alteration(arguments=((script.option, str(value)),))
        found = batch_alteration(script.seen, value)
        if found is None:
            raise UsageError(
                "the program's batch size is neither an option of its command line nor that of a DataLoader",
                "Name an option of the program: vramfit fit --largest NAME",
            )
        return found.alteration

    def altered_cost(self, alteration: Alteration, budget: int | None = None) -> StepCost:
        """The same of the program as something alters it; of one that trains nothing, for the whole of it.

        Raises:
            VramfitError: the program failed for another reason than memory.
        """
        watches: list[_Watch] = []
        found = self._run(alteration, budget, steps=STEPS, places=None, watches=watches)
        outcome = found.run.devices[0]
        last = WatchedStep() if found.failed or found.steps < STEPS else watches[0].step
        seconds = last.seconds + last.driver.seconds
        if found.seen.infers and not found.failed:
            seconds = found.run.seconds_simulated
        return StepCost(
            fits=not found.failed,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            outside_bytes=outcome.context_bytes,
            host_bytes=found.host_bytes,
            step_seconds=seconds,
            step_flops=last.flops,
            retries=last.driver.retries,
            retry_seconds=last.driver.seconds,
            oom=found.run.oom.message if found.failed and found.run.oom is not None else "",
        )

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run two steps on an endless card and look at the second; see `DeviceBackend.profile_step`.

        Raises:
            VramfitError: the program failed, or took fewer steps.
        """
        watches: list[_Watch] = []
        alteration = Alteration(choices=choices_of(workload))
        found = self._run(alteration, None, steps=STEPS, places=places, watches=watches)
        profiler = watches[0].profiler if watches else None
        if found.steps < STEPS or profiler is None or found.model is None:
            raise UsageError(
                f"the program ends after {found.steps} of the {STEPS} steps that a plan looks at",
                "Let it take two steps at least",
            )
        step, outcome = profiler.profile(), found.run.devices[0]
        state = State(model=found.model, optimizer=found.optimizer, device=torch.device("cuda"))
        profile = profile_of(
            workload,
            state,
            sizes,
            step,
            device_type="cuda",
            capability=self.spec.compute_capability,
            total_bytes=self.spec.total_bytes,
            host_bytes=self.host_bytes,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            setup_bytes=found.setup_bytes,
            outside_bytes=outcome.context_bytes,
            categories=categories_of(found.run),
            link_bytes_per_second=self.spec.host_link,
            host_peak_bytes=found.host_bytes,
        )
        return profile, step

    def _run(
        self,
        alteration: Alteration,
        budget: int | None,
        *,
        steps: int,
        places: Callable[[nn.Module], Sequence[str]] | None,
        watches: list[_Watch] | None = None,
    ) -> ScriptRun:
        """Run some steps of the program; the last is watched where somebody asks for it."""
        choices = alteration.choices
        total = _ENDLESS if budget is None else budget
        spec = replace(self.spec, total_bytes=total, context_bytes=self.spec.typical_context_bytes)
        conf = alteration.alloc_conf or self._options.alloc_conf
        conf = next((choice.setting.conf for choice in choices if choice.name == STARTING), conf)  # type: ignore[attr-defined]
        gpu = VirtualGPU(replace(self._options, gpu=spec, alloc_conf=conf))
        attached: list[tuple[nn.Module, Any]] = []
        setup: list[int] = []
        failed = False
        with same_start(), PatchStack() as patches, gpu:
            observer = observe_program(gpu.meter.modules, gpu.meter.phases, patches)
            script = AttachedScript(choices, self._target, observer.finder)
            script.exchanged = observer.replaced
            script.watch_loading(patches)
            watch = _Watch(gpu)
            if watches is not None:
                watches.append(watch)

            def met(root: nn.Module) -> None:
                setup.append(torch.cuda.max_memory_allocated())
                if script.meet(root):
                    live = script.live
                    assert live is not None
                    attached.append((live.model, next(iter(observer.finder.owners(root)), None)))

            def stepped(number: int) -> None:
                between_steps()
                if watches is None:
                    return
                if number == steps - 1:
                    watch.begin(attached[0][0] if attached else None, places)
                elif number == steps:
                    watch.end()

            observer.on_training = met
            counter = ScriptSteps(steps, stepped)
            counter.install(gpu.meter.phases, patches)
            try:
                with _ending(watch), alteration.applied() as effects:
                    run_here(alteration.command(self._command), alteration.sources)
            except torch.OutOfMemoryError as error:
                if gpu.run.oom is None:
                    raise VramfitError(f"the program ran out of memory outside the card: {error}") from error
                failed = True
            except (VramfitError, KeyboardInterrupt):
                raise
            except BaseException as error:
                if not (gpu.run.oom is not None and budget is not None):
                    raise VramfitError(f"the program fails: {brief(error)}", "Run it: vramfit run") from error
                failed = True
            pageable = script.live.pageable_bytes if script.live is not None else 0
            run, seen = gpu.run, observer.observed()
            failed = failed or (budget is not None and run.oom is not None)
            if script.live is not None:
                with _forgiving():
                    script.live.undo()
        gc.collect()
        if not failed:
            _check_effects(effects, alteration, seen)
        model, optimizer = attached[0] if attached else (None, None)
        return ScriptRun(
            run=run,
            seen=seen,
            model=model,
            optimizer=optimizer,
            steps=counter.count,
            host_bytes=run.host_pinned_peak_bytes + pageable,
            failed=failed,
            setup_bytes=setup[0] if setup else 0,
        )


def _check_effects(effects: Effects, alteration: Alteration, seen: ObservedProgram) -> None:
    """Make sure that what was to change did: a program may read an argument and ignore it.

    Raises:
        UsageError: something did not.
    """
    if effects.missed:
        raise UsageError(
            f"the program makes no {' and no '.join(effects.missed)} with what was to change",
            "Change it by hand",
        )
    batch = batch_size(seen)
    if alteration.batch is not None and batch is not None and batch != alteration.batch:
        raise UsageError(
            f"the program's batch is of {batch} examples still, not {alteration.batch}",
            "Name the option that sets it: vramfit fit --largest NAME",
        )


@contextmanager
def _ending(watch: _Watch) -> Iterator[None]:
    """End what is watched, also where the program fails in the middle of a step."""
    try:
        yield
    finally:
        watch.end()


@contextmanager
def _forgiving() -> Iterator[None]:
    """What undoing does to memory counts no more, nor whether there is enough of it."""
    with suppress(torch.OutOfMemoryError):
        yield


def found_target(seen: ObservedProgram, *, trained: bool = True) -> TrainedTarget:
    """The model that techniques are for.

    Args:
        trained: whether it has to be trained.

    Raises:
        UsageError: there is none that they can be attached to.
    """
    model, used = seen.main_model, seen.main_used
    if not trained and seen.infers and used is not None:
        return TrainedTarget(kind=used.kind, parameters=used.parameters, trained=0)
    if seen.unclear:
        what, _, advice = seen.unclear[0].partition("; ")
        raise UsageError(f"nothing can be attached to this program: {what}", advice or "See docs/fit.md")
    if model is None:
        raise UsageError(
            "the program ends before it trains a model: no module was called with gradients whose parameters an "
            "optimizer has",
            "Give the arguments with which it trains; for inference, see vramfit run",
        )
    return TrainedTarget(kind=model.kind, parameters=model.parameters, trained=model.trained)
