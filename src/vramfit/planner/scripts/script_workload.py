"""A program in the place of a workload: what the planner may know of it, and nothing that it would have to make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from vramfit.attaching.attached_script import TrainedTarget
from vramfit.errors import VramfitError
from vramfit.planner.comparing import Compared
from vramfit.planner.plan_file import PlanTarget
from vramfit.planner.plans import Plan
from vramfit.planner.remedies.batch_change import batch_size
from vramfit.planner.search_clock import SearchClock
from vramfit.techniques import Choice
from vramfit.techniques.core.technique import AppliedWorkload
from vramfit.trace.observed_program import ObservedProgram
from vramfit.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptWorkload(Workload):
    """A program that trains a model; its step is its own, as of a workload with ``step``.

    Attributes:
        command: what python is given.
        target: the model that techniques are for.
        seen: what the plain program was seen to train.
        compare: compares a plan's gradients with its own.
        option: of the program's command line, which its size is the value of; empty where that is its batch, as its
            loader or its option makes it.
    """

    command: tuple[str, ...]
    target: TrainedTarget
    seen: ObservedProgram
    compare: Callable[[ScriptWorkload, Plan, SearchClock], Compared]
    option: str = ""

    def sized(self, option: str, value: int) -> ScriptWorkload:
        """The same with the value of an option of its command line as its size."""
        return replace(self, option=option, sizes={option.lstrip("-"): value})

    def check_promises(self, plan: Plan, clock: SearchClock) -> Compared:
        """Compare a plan's gradients with the plain program's, by what the program was opened with."""
        return self.compare(self, plan, clock)


def script_workload(
    command: Sequence[str],
    target: TrainedTarget,
    seen: ObservedProgram,
    compare: Callable[[ScriptWorkload, Plan, SearchClock], Compared],
) -> ScriptWorkload:
    """A program as a workload; nothing of it can be made apart from a run."""
    return ScriptWorkload(
        model=_apart,
        batch=_apart,
        sizes={"batch_size": max(1, batch_size(seen) or 1)},
        step=_apart,
        optimizer=_apart,
        command=tuple(command),
        target=target,
        seen=seen,
        compare=compare,
    )


def aim_of(script: ScriptWorkload, aim: PlanTarget) -> PlanTarget:
    """What a plan was made for, with the program and its model."""
    return replace(
        aim,
        program=script.command,
        model=script.target.kind,
        model_parameters=script.target.parameters,
        trained_parameters=script.target.trained,
    )


def script_of(workload: Workload) -> ScriptWorkload:
    """The program of a candidate."""
    base = workload.base if isinstance(workload, AppliedWorkload) else workload
    assert isinstance(base, ScriptWorkload)
    return base


def choices_of(workload: Workload) -> tuple[Choice, ...]:
    """The techniques that a candidate has."""
    return workload.choices if isinstance(workload, AppliedWorkload) else ()


def _apart(*_: Any, **__: Any) -> NoReturn:
    raise VramfitError(
        "a part of a program was asked for apart from its run",
        "Please report this at the issue tracker, with the command line",
    )
