"""A program that is run with a plan and without an edit: what the child is given, and what the run says of the plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vramfit.attaching.attached_script import STARTING, TrainedTarget, check_attachable
from vramfit.attaching.plan_hook import NAME, plan_hook
from vramfit.errors import UsageError
from vramfit.launch.child_hooks import ChildHook
from vramfit.masking import mask_arguments
from vramfit.options.run_options import RunOptions
from vramfit.planner.plans import Plan
from vramfit.trace import Run
from vramfit.trace.applied_plan import AppliedPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProgram:
    """A plan on its way to a program.

    Attributes:
        plan: the plan.
        file: where it was read from.
    """

    plan: Plan
    file: str

    @classmethod
    def load(cls, file: Path) -> PlannedProgram:
        """Read a plan for a program.

        Raises:
            UsageError: there is no such file, it is no plan, or a technique of it changes the training loop.
        """
        plan = Plan.load(file)
        check_attachable(plan.choices)
        return cls(plan=plan, file=str(file))

    @property
    def target(self) -> TrainedTarget | None:
        """The model that the techniques are for; None for the first that is trained."""
        aim = self.plan.aim
        if not aim.model:
            return None
        return TrainedTarget(kind=aim.model, parameters=aim.model_parameters, trained=aim.trained_parameters)

    @property
    def alloc_conf(self) -> str | None:
        """Settings of the allocator that the program is to be started with; None for those it has."""
        return next(
            (choice.setting.conf for choice in self.plan.choices if choice.name == STARTING),  # type: ignore[attr-defined]
            None,
        )

    @property
    def hook(self) -> ChildHook:
        """What attaches the techniques in the child."""
        return plan_hook(self.plan.choices, self.target)

    def options(self, given: RunOptions) -> RunOptions:
        """The options of a run with the plan's settings of the allocator.

        Raises:
            UsageError: others were given.
        """
        conf = self.alloc_conf
        if conf is None:
            return given
        if given.alloc_conf is not None and given.alloc_conf != conf:
            raise UsageError(
                f"the plan has allocator settings of its own, {conf}, and {given.alloc_conf} was given",
                "Leave one of them out",
            )
        return replace(given, alloc_conf=conf)

    def made_for(self, command: Sequence[str]) -> str:
        """The command line that the plan was made for, where `command` is another; else empty."""
        own = self.plan.aim.program
        return shlex.join(mask_arguments(own)) if own and not _same_commands(own, command) else ""

    def told(self, run: Run, command: Sequence[str] | None = None) -> Run:
        """A run with what it says of the plan.

        Args:
            command: what was run; None where each rank has its own.
        """
        left = run.left.get(NAME, {})
        plan = self.plan
        applied = AppliedPlan(
            file=self.file,
            techniques=tuple(choice.name for choice in plan.choices),
            numerics=plan.numerics.value,
            attached=bool(left.get("attached")),
            device=plan.aim.device,
            promised_bytes=plan.after.total_bytes,
            plain_bytes=plan.before.total_bytes,
            made_for="" if command is None else self.made_for(command),
        )
        return replace(run, plan=applied)


def _same_commands(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two command lines run the same file, or module, with the same arguments."""
    if not one or not other or list(one[1:]) != list(other[1:]):
        return False
    return one[0] == other[0] or os.path.realpath(one[0]) == os.path.realpath(other[0])
