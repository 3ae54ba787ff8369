"""The questions by which a plan is held against runs: its memory, its values, and what it takes on a card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from vramfit.errors import UsageError
from vramfit.planner.comparing import ComparesItself
from vramfit.planner.devices.card_backend import another_card, card_of
from vramfit.planner.output_check import compare_outputs
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.plans import Plan, sizes_of
from vramfit.planner.verification import (
    CardRuns,
    Simulated,
    ValuesCheck,
    compare,
    run_on,
    simulate,
    smaller_sizes,
    too_large,
)
from vramfit.planner.workload_check import check_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRun:
    """A run on this machine's card.

    Attributes:
        name: what it is called while it is made.
        plan: the file of the plan that is applied; None for the plain program.
        sizes: of the batch.
        limit: bytes that it may take; None for the card.
    """

    name: str
    plan: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRunsQuestion(PlannerQuestion[CardRuns]):
    """What a workload takes on this machine's card, plain or with plans.

    Attributes:
        runs: those that are made.
        any_card: whether a card of another kind will do.
    """

    runs: tuple[AskedRun, ...]
    any_card: bool = False

    def answer(self, asked: QuestionContext) -> CardRuns:
        """See `PlannerQuestion.answer`."""
        workload, card = asked.workload, card_of(asked.device)
        if why := another_card(card, None if self.any_card else asked.memory.gpu):
            return CardRuns(card=card.name, skipped=why)
        runs = []
        for run in self.runs:
            asked.progress(f"{run.name}, on {card.name}")
            program = workload if run.plan is None else Plan.load(run.plan).apply(workload)
            runs.append(run_on(card, program, sizes_of(workload, run.sizes), run.limit))
        return CardRuns(card=card.name, runs=tuple(runs), left_bytes=card.left_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemoryQuestion(PlannerQuestion[Simulated]):
    """Whether a plan's memory is what its file says."""

    plan: str

    def answer(self, asked: QuestionContext) -> Simulated:
        """See `PlannerQuestion.answer`."""
        plan = Plan.load(self.plan)
        if not isinstance(asked.workload, ComparesItself):
            check_workload(asked.workload, sizes_of(asked.workload, dict(plan.aim.sizes)), asked.progress)
        asked.progress("the program before and after, on the device")
        return simulate(asked.device, asked.workload, plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramValuesQuestion(PlannerQuestion[ValuesCheck]):
    """Whether a program's gradients and losses are what its plan promises, by runs of the program on the CPU.

    Attributes:
        steps: of the loss curve.
        seconds: for the runs, about.
    """

    plan: str
    steps: int
    seconds: float

    def answer(self, asked: QuestionContext) -> ValuesCheck:
        """See `PlannerQuestion.answer`."""
        from vramfit.planner.scripts.script_comparison import values_of_program
        from vramfit.planner.scripts.script_workload import script_of

        asked.progress("gradients and losses of the program itself")
        plan = Plan.load(self.plan)
        return values_of_program(script_of(asked.workload), plan, steps=self.steps, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanValuesQuestion(PlannerQuestion[ValuesCheck]):
    """Whether gradients and losses are what a plan promises, on the CPU that the process is on.

    Attributes:
        sizes: of the batches; empty takes the plan's, smaller where that would take too long.
        steps: of the loss curve.
        seconds: for the loss curves, about.
        step_seconds: that one step of the plain program takes, by a guess.
    """

    plan: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: int
    seconds: float
    step_seconds: float

    def answer(self, asked: QuestionContext) -> ValuesCheck:
        """See `PlannerQuestion.answer`."""
        workload, progress = asked.workload, asked.progress
        plan = Plan.load(self.plan)
        if why := too_large(workload, asked.memory.host_bytes):
            return ValuesCheck(skipped=why, sizes=dict(plan.aim.sizes))
        sizes = sizes_of(workload, self.sizes)
        check_workload(workload, sizes, progress)
        if not self.sizes:
            steps = self.steps if workload.trains else 1
            sizes = smaller_sizes(workload, plan, self.step_seconds, self.seconds, steps)
        if not workload.trains:
            progress("outputs")
            outputs = compare_outputs(workload, plan.apply(workload), sizes, plan.numerics)
            return ValuesCheck(sizes=sizes, outputs=outputs)
        gradients, losses, notes = compare(
            workload, plan, sizes, steps=self.steps, seconds=self.seconds, progress=progress
        )
        if losses.plain and not math.isfinite(losses.plain[0]):
            raise UsageError(
                f"the plain program's loss is {losses.plain[0]}: nothing can be compared with it",
                "Let batch make values that the model can train on",
            )
        if not gradients.parameters:
            notes = (*notes, "no gradients were compared: no parameter had one")
        if not losses.plain:
            notes = (*notes, "no losses were compared: the workload's steps give none")
        return ValuesCheck(
            sizes=sizes,
            gradients=gradients if gradients.parameters else None,
            losses=losses if losses.plain else None,
            notes=tuple(notes),
        )
