"""Compares a plan's gradients with the plain program's, by runs of the program itself on this machine's CPU.

The program runs for real, with fewer examples where its loader lets them be fewer, for a few steps: plain, and with the
techniques of each level of numerics. Gradients are those of its first step, by its own loss, and so is what the passes
write beside them: buffers, counters, attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from vramfit.attaching.attached_script import STARTING, AttachedScript
from vramfit.attaching.first_training import FirstTraining
from vramfit.capture.observing.training_finder import TrainingFinder
from vramfit.capture.optimizer_rounds import OptimizerRounds
from vramfit.patching import PatchStack
from vramfit.planner.comparing import Compared
from vramfit.planner.devices.cpu_backend import cpu_seconds
from vramfit.planner.devices.same_start import same_start
from vramfit.planner.gradient_check import COMPILING
from vramfit.planner.plans import Plan
from vramfit.planner.promise_comparison import words_of_check, words_of_fault
from vramfit.planner.scripts.script_place import run_here
from vramfit.planner.scripts.script_steps import EnoughSteps
from vramfit.planner.scripts.script_workload import ScriptWorkload
from vramfit.planner.search_clock import SearchClock, TimeOver, limited
from vramfit.planner.state_check import StateDifference, differing_states
from vramfit.planner.trial_attempts import most_model_bytes
from vramfit.planner.verification import (
    GradientCheck,
    ValuesCheck,
    judge_gradients,
    judge_losses,
    with_states,
)
from vramfit.planner.workload_check import brief
from vramfit.techniques import AttachedProgram, Choice, Numerics
from vramfit.training_state.forward_state import ForwardState, Written
from vramfit.units import counted

_STEPS = 3
"""Steps of each run: what an optimizer does shows in the losses after its first steps."""

_SECONDS, _LONGEST = 60.0, 90.0
"""Seconds that a run may take by its estimate, and after which it is given up."""

_LEAST = 5
"""Examples in the smallest batch."""

_PART, _MOST = 1 / 16, 1 << 30
"""The share of the machine's memory that a model's values may take, and the most bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run of the program gave.

    Attributes:
        gradients: of its first step, in float64, by parameter.
        dtypes: of the parameters.
        losses: those from which it went backward.
        written: what the passes of its first step wrote into the model beside gradients, by name.
    """

    gradients: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    losses: tuple[float, ...]
    written: Mapping[str, Written]


class _Broken(Exception):  # no error: a finding
    """Techniques do not keep a promise together."""

    def __init__(self, choices: Sequence[Choice], level: Numerics, check: GradientCheck) -> None:
        super().__init__()
        self.choices, self.level, self.check = choices, level, check


def compare_program(script: ScriptWorkload, plan: Plan, clock: SearchClock) -> Compared:
    """Hold a plan's techniques to their promises."""
    choices = [choice for choice in plan.choices if choice.name not in (*COMPILING, STARTING)]
    if not choices:
        return Compared()
    comparison = _Comparison(script, plan, clock)
    why = comparison.why_not
    if not why:
        try:
            return comparison.of(choices)
        except TimeOver:
            why = "the time was over"
        except KeyboardInterrupt:
            why = "that was interrupted"
        except _Broken as broken:
            return comparison.judged_again(choices, broken)
        except BaseException as error:  # whatever the program makes of the CPU
            why = f"the program fails on the CPU ({brief(error)})"
    return Compared(
        note=f"The plan's gradients were not compared with the plain program's, since {why}: the losses of the first "
        "steps with vramfit run --plan, beside those without, show whether it trains as before."
    )


def values_of_program(script: ScriptWorkload, plan: Plan, *, steps: int, seconds: float) -> ValuesCheck:
    """Gradients of a program's first step and its first losses, plain and with a plan, on the CPU.

    Args:
        steps: of the loss curve, at most.
        seconds: for both runs, about: there are fewer steps, and fewer examples, where that is not enough.
    """
    choices = [choice for choice in plan.choices if choice.name != STARTING]
    comparison = _Comparison(script, plan, SearchClock())
    sizes = {"batch_size": comparison.examples or next(iter(script.sizes.values()))}
    if comparison.why_not:
        return ValuesCheck(sizes=sizes, skipped=comparison.why_not)
    one = max(cpu_seconds(plan.before.step_flops), 1e-3)
    taken = max(_STEPS, min(steps, math.floor(seconds / 2 / one)))
    try:
        with limited(SearchClock(), seconds, part=1.0):
            plain, planned = (
                train_here(script, some, examples=comparison.examples, steps=taken) for some in ((), choices)
            )
            off = differing_states(plain.written, planned.written, plan.numerics)
            if off:
                again = train_here(script, (), examples=comparison.examples, steps=1)
                off = steady_ones(off, plain.written, again.written)
    except TimeOver:
        return ValuesCheck(sizes=sizes, skipped="the time was over")
    except (Exception, SystemExit) as error:  # whatever the program makes of the CPU
        return ValuesCheck(sizes=sizes, skipped=f"the program fails on the CPU ({brief(error)})")
    losses = judge_losses(list(plain.losses), list(planned.losses), plan.numerics)
    gradients = judge_gradients(plain.gradients, planned.gradients, plan.numerics, plain.dtypes)
    gradients = with_states(gradients, len(plain.written), off)
    return ValuesCheck(
        sizes=sizes,
        gradients=gradients if gradients.parameters else None,
        losses=losses if losses.plain else None,
    )


def unsteady_names(plain: Mapping[str, Written], again: Mapping[str, Written]) -> frozenset[str]:
    """Names of what two runs of the plain program write differently: times, addresses, random identities."""
    return frozenset(one.name for one in differing_states(plain, again, Numerics.BITWISE))


def steady_ones(
    off: Sequence[StateDifference], plain: Mapping[str, Written], again: Mapping[str, Written]
) -> list[StateDifference]:
    """Differences without those that two runs of the plain program have, too."""
    unsteady = unsteady_names(plain, again)
    return [one for one in off if one.name not in unsteady]


class _Comparison:
    """Runs of a program, plain and with this or that technique."""

    def __init__(self, script: ScriptWorkload, plan: Plan, clock: SearchClock) -> None:
        self._script, self._clock = script, clock
        self._plain: Trained | None = None
        self._unsteady: frozenset[str] = frozenset()
        self.examples: int | None = None
        self.why_not = ""
        loaders = [loader for loader in script.seen.loaders if loader.batch_size]
        own = loaders[0].batch_size if loaders else None
        seconds = cpu_seconds(plan.before.step_flops) * _STEPS
        if script.target.parameters * 4 > most_model_bytes(_PART, _MOST):
            self.why_not = "the model is too large for it here"
        elif seconds > _SECONDS and own is not None:
            self.examples = max(min(own, _LEAST), math.floor(own * _SECONDS / seconds))
            seconds *= self.examples / own
        if not self.why_not and seconds > _SECONDS:
            self.why_not = "a step takes too long here"

    def of(self, choices: Sequence[Choice]) -> Compared:
        """Hold techniques to their promises, each level with those before it.

        Raises:
            _Broken: they do not keep one.
        """
        check: GradientCheck | None = None
        for level in sorted({choice.promise.numerics for choice in choices}):
            if level is Numerics.APPROXIMATE and check is not None:
                break
            held = [choice for choice in choices if choice.promise.numerics <= level]
            check = self._judged(held, level)
        if check is None or not check.parameters:
            return Compared()
        return Compared(note=words_of_check(check, self._words_of_way), by=self._words_of_way)

    def _judged(self, choices: Sequence[Choice], level: Numerics) -> GradientCheck:
        plain, planned = self._without(), self._trained(choices)
        check = judge_gradients(plain.gradients, planned.gradients, level, plain.dtypes)
        off = differing_states(plain.written, planned.written, level)
        off = [one for one in off if one.name not in self._unsteady]
        check = with_states(check, len(plain.written), off)
        if not check.passes or (level is Numerics.BITWISE and plain.losses != planned.losses):
            raise _Broken(choices, level, check)
        return check

    def judged_again(self, choices: Sequence[Choice], broken: _Broken) -> Compared:
        """A failed comparison, without what differs between two runs of the plain program; else, whose fault it is.

        Args:
            choices: all that were compared.
            broken: how that ended.
        """
        plain, again = self._without(), self._trained(())
        if not judge_gradients(plain.gradients, again.gradients, Numerics.BITWISE, again.dtypes).passes:
            return Compared(
                note="The plan's gradients were not compared: two runs of the plain program differ by themselves."
            )
        self._unsteady = unsteady_names(plain.written, again.written)
        if self._unsteady:
            try:
                return self.of(choices)
            except _Broken as still:
                broken = still
        return self._blamed(broken)

    def _blamed(self, broken: _Broken) -> Compared:
        """Which of the techniques does not keep its promise."""
        fault = max(broken.choices, key=lambda choice: choice.promise.numerics)
        for choice in broken.choices if len(broken.choices) > 1 else ():
            try:
                self._judged([choice], choice.promise.numerics)
            except _Broken:
                fault = choice
                break
            except Exception:  # some do not run without others
                continue
        return Compared(note=f"{words_of_fault(fault, broken.check, self._words_of_way)}.", fault=fault)

    @property
    def _words_of_way(self) -> str:
        batch = "its own batch" if self.examples is None else counted(self.examples, "example")
        return f"the program itself on the CPU, with {batch}"

    def _without(self) -> Trained:
        if self._plain is None:
            self._plain = self._trained(())
        return self._plain

    def _trained(self, choices: Sequence[Choice]) -> Trained:
        with limited(self._clock, _LONGEST, part=1.0):
            return train_here(self._script, choices, examples=self.examples)


def train_here(
    script: ScriptWorkload, choices: Sequence[Choice], *, examples: int | None = None, steps: int = _STEPS
) -> Trained:
    """Run some steps of a program for real, in this process.

    Args:
        choices: techniques that are attached to it.
        examples: of a batch; None for as many as the program takes.

    Raises:
        BaseException: what the program raised.
    """
    found = _Notes()
    rounds = OptimizerRounds()

    def make(finder: TrainingFinder) -> AttachedScript:
        attached = AttachedScript(choices, replace(script.target), finder)
        attached.exchanged = rounds.leave
        attached.attached = found.begin
        return attached

    def refuse(error: Exception) -> Any:
        raise error

    watch = FirstTraining(make, refuse)
    counted_steps = 0

    def stepped(ends_round: bool) -> None:
        nonlocal counted_steps
        counted_steps += ends_round
        if counted_steps >= steps:
            raise EnoughSteps(0)

    def before_step(*_: Any) -> None:
        live = watch.script.live
        if live is not None and found.waits:
            found.look(live.model)

    with same_start(), PatchStack() as patches:
        rounds.on_step = stepped
        rounds.follow(patches)
        watch.wait()
        patches.call(watch.close)
        patches.call(register_optimizer_step_pre_hook(before_step).remove)
        patches.set(torch.Tensor, "backward", found.following_losses())
        if examples is not None:
            patches.set(DataLoader, "__init__", _with_fewer(examples))
        try:
            run_here(script.command)
        finally:
            if watch.script.live is not None:
                watch.script.live.undo()
    return Trained(
        gradients=found.gradients, dtypes=found.dtypes, losses=tuple(found.losses), written=found.written
    )


class _Notes:
    """What is noted of a run."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.losses: list[float] = []
        self.written: Mapping[str, Written] = {}
        self._before: ForwardState | None = None

    @property
    def waits(self) -> bool:
        """Whether the first pass of the model has begun, and its step has not been looked at."""
        return self._before is not None

    def begin(self, live: AttachedProgram) -> None:
        """The first pass begins, with all techniques attached."""
        self._before = ForwardState(live.model)

    def look(self, model: torch.nn.Module) -> None:
        """Note the gradients of a model, and what its passes have written."""
        assert self._before is not None
        self.written, self._before = self._before.written(), None
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                self.gradients[name] = (
                    (gradient.to_dense() if gradient.is_sparse else gradient).double().clone()
                )
                self.dtypes[name] = parameter.dtype

    def following_losses(self) -> Callable[..., Any]:
        """`Tensor.backward` that also notes the loss."""
        original: Callable[..., Any] = torch.Tensor.backward

        @wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                self.losses.append(float(tensor.detach()))
            return original(tensor, *args, **kwargs)

        return backward


def _with_fewer(examples: int) -> Callable[..., None]:
    """`DataLoader.__init__` with smaller batches."""
    original: Callable[..., None] = DataLoader.__init__

    @wraps(original)
    def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        if isinstance(batch_size, int):
            batch_size = min(batch_size, examples)
        original(self, dataset, batch_size, *args, **kwargs)

    return init
