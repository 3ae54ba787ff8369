"""Asks for plans, largest sizes and verifications of a workload's file, each of a process of its own.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import GpuSpec
from vramfit.launch.job import Failure
from vramfit.planner.asking import answered, ask, job_of, run_job
from vramfit.planner.planner_job import DeviceMemory, MemoryBudget, PlanOptions

if TYPE_CHECKING:
    from vramfit.planner.largest_size import LargestSize
    from vramfit.planner.plans import Plan
    from vramfit.planner.search import FrontierPoint
    from vramfit.planner.verification import CardRuns, Measured, Verification
    from vramfit.planner.verify_questions import AskedRun

Progress = Callable[[str], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What the planner found.

    Attributes:
        plan: the best plan, or the closest where none fits.
        frontier: peak against step time, from the lowest peak on; empty unless it was asked for.
        failure: why nothing fits; None where something does.
    """

    plan: Plan
    frontier: tuple[FrontierPoint, ...] = ()
    failure: VramfitError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What a plan is compared with, and for how long.

    Attributes:
        memory: whether memory is looked at.
        values: whether gradients and losses are.
        card: whether memory and time are measured on this machine's card; None does so if it is of the plan's kind.
        sizes: of the batches for gradients and losses; empty takes the plan's, smaller where that would take too long.
        steps: of the loss curve.
        seconds: for the loss curves, about.
    """

    memory: bool = True
    values: bool = True
    card: bool | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: int = 50
    seconds: float = 120.0


def plan_in_child(
    target: str,
    memory: MemoryBudget,
    options: PlanOptions,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Planned:
    """Find a plan for ``FILE.py:NAME`` in a process of its own.

    Interrupted, it gives the best plan so far; the plan says that it is that.

    Args:
        fresh: whether what earlier searches saw is left aside.

    Raises:
        KeyboardInterrupt: it was interrupted before there was a plan.
        UsageError: the workload, a technique or a size is not there, or the workload cannot be planned for.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.plan_file import plan_from_toml
    from vramfit.planner.plan_question import PlanQuestion
    from vramfit.planner.plans import Plan

    question = PlanQuestion(options=options)
    job = job_of(question, target, memory.settled(), fresh=fresh)
    answer = run_job(job, question.result_type(), progress)
    if isinstance(answer, Failure):
        if "plan" not in answer.found:
            raise answer.error()
        closest = plan_from_toml(answer.found["plan"], Plan)
        return Planned(plan=closest, failure=answer.error())
    found = answer.found
    return Planned(plan=plan_from_toml(found.plan, Plan), frontier=found.frontier)


_CONFIRMING = 3
"""How often a plan for a program is made anew where a run in a process of its own takes more than was planned."""


def plan_program(
    program: Sequence[str],
    memory: MemoryBudget,
    options: PlanOptions,
    *,
    progress: Progress | None = None,
) -> Planned:
    """Find a plan for a program as it is, and confirm it by a run of the program in a process of its own.

    Args:
        program: what python is given: the script and its arguments, or ``-m``, a module and its arguments.

    Raises:
        KeyboardInterrupt: it was interrupted before there was a plan.
        UsageError: the program trains no model that techniques can be attached to, or takes too few steps.
        VramfitError: the program itself fails.
    """
    from vramfit.planner.plan_file import plan_from_toml
    from vramfit.planner.plan_question import PlanQuestion
    from vramfit.planner.plans import Plan
    from vramfit.planner.scripts.script_confirmation import confirmed

    question = PlanQuestion(options=options)
    excess = 0
    for _ in range(_CONFIRMING):
        settled = memory.settled()
        space = replace(settled, margin=settled.margin + excess)
        answer = run_job(job_of(question, "", space, program=program), question.result_type(), progress)
        if isinstance(answer, Failure):
            if "plan" not in answer.found:
                raise answer.error()
            return Planned(plan=plan_from_toml(answer.found["plan"], Plan), failure=answer.error())
        plan = plan_from_toml(answer.found.plan, Plan)
        plan = replace(plan, aim=replace(plan.aim, margin_bytes=settled.margin))
        if progress is not None:
            progress("the program with its plan, in a process of its own")
        plan, missing = confirmed(plan, settled)
        if not missing:
            return Planned(plan=plan, frontier=answer.found.frontier)
        excess += missing
    why = "the program with its plan needs more in a process of its own than in the search"
    return Planned(plan=plan, failure=VramfitError(why, "Plan with a larger --margin"))


def fit_in_child(
    target: str,
    memory: MemoryBudget,
    *,
    size: str | None = None,
    sizes: Mapping[str, int] | None = None,
    plan: Path | None = None,
    card: bool | None = None,
    progress: Progress | None = None,
    program: Sequence[str] = (),
) -> LargestSize:
    """The largest value of a size of ``FILE.py:NAME`` that fits, in a process of its own.

    Args:
        program: the command line of a program in its place: its size is an option of that, or its loader's batch.
        size: the name of the size; None for the workload's first.
        sizes: where to begin, and the other sizes.
        card: whether what was found is confirmed on this machine's card; None does so if it is of the kind of `memory`.

    Raises:
        UsageError: the workload or the size is not there, or a card was asked for and there is none.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.largest_size import with_card
    from vramfit.planner.size_questions import SizeOnCardQuestion, SizeQuestion

    _check_card(card, memory.gpu)
    sizes, file = dict(sizes or {}), None if plan is None else os.path.abspath(plan)
    space = memory.settled()
    question = SizeQuestion(size=size, sizes=sizes, plan=file)
    answer = answered(question, target, space, progress=progress, program=program)
    largest = answer.found
    if program or memory.gpu is None or not largest.value or not (answer.card_here if card is None else card):
        return largest
    on_card = SizeOnCardQuestion(
        size=largest.size, value=largest.value, sizes=sizes, plan=file, any_card=card is True
    )
    return with_card(largest, ask(on_card, target, _on_card(space), progress=progress))


def measure_in_child(
    target: str,
    memory: MemoryBudget,
    runs: Sequence[AskedRun],
    *,
    card: bool | None = None,
    progress: Progress | None = None,
) -> CardRuns:
    """Run ``FILE.py:NAME`` on this machine's card, plain or with plans, in a process of its own.

    Args:
        card: True for any card; None refuses one of another kind than that of `memory`.

    Raises:
        UsageError: there is no card, no such workload or no such plan.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.verify_questions import CardRunsQuestion

    question = CardRunsQuestion(runs=tuple(runs), any_card=card is True)
    return ask(question, target, _on_card(memory.settled()), progress=progress)


def _check_card(card: bool | None, gpu: GpuSpec | None) -> None:
    if card and gpu is None:
        raise UsageError(
            "a card was asked for, but this is for the CPU", "Leave --card out, or give --gpu NAME"
        )


def _on_card(memory: DeviceMemory) -> DeviceMemory:
    """The same on this machine's card."""
    return replace(memory, device="card")


def verify_in_child(
    file: Path,
    options: VerifyOptions | None = None,
    *,
    target: str | None = None,
    gpu: GpuSpec | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Hold a plan against a run of its memory, and against the plain program's gradients and losses on this CPU.

    Its memory is simulated, and measured where this machine has the card that the plan is for.

    Args:
        options: what is compared; None for all of it.
        target: ``FILE.py:NAME``; None for the one that the plan was made for.
        gpu: the virtual card; None for the one that the plan names.

    Raises:
        UsageError: there is no such plan or workload, or a card was asked for and there is none.
        VramfitError: the workload itself fails.
    """
    from vramfit.gpus import find_gpu
    from vramfit.planner.devices.cpu_backend import cpu_seconds
    from vramfit.planner.plans import Plan
    from vramfit.planner.verification import ValuesCheck, Verification
    from vramfit.planner.verify_questions import PlanMemoryQuestion, PlanValuesQuestion

    options = options or VerifyOptions()
    plan = Plan.load(file)
    if plan.aim.program and target is None:
        return _verified_program(file, plan, options, gpu, progress)
    target = target or plan.aim.target
    if not target:
        raise UsageError(f"{file} does not say for which workload it is", "Give it: --workload FILE.py:NAME")
    if target == plan.aim.target and not Path(target.rpartition(":")[0]).is_file():
        raise UsageError(
            f"{file} is for {target}, and there is no such file beside it or here",
            "Give it: --workload FILE.py:NAME",
        )
    if gpu is None and plan.aim.device != "CPU":
        gpu = find_gpu(plan.aim.device)
    _check_card(options.card, gpu)
    space = MemoryBudget(gpu=gpu, budget=plan.aim.budget_bytes, margin=plan.aim.margin_bytes)
    planned = os.path.abspath(file)
    simulated, measured = None, None
    notes: tuple[str, ...] = ()
    if options.memory:
        answer = answered(PlanMemoryQuestion(plan=planned), target, space.settled(), progress=progress)
        simulated = answer.found
        if gpu is not None and (answer.card_here if options.card is None else options.card):
            measured, notes = _measured(target, space, plan, planned, options.card, progress)
    values = ValuesCheck(sizes=plan.aim.sizes, skipped="not asked for")
    if options.values:
        comparison = PlanValuesQuestion(
            plan=planned,
            sizes=dict(options.sizes),
            steps=options.steps,
            seconds=options.seconds,
            step_seconds=cpu_seconds(plan.before.step_flops),
        )
        on_cpu = MemoryBudget(gpu=None, budget=plan.aim.budget_bytes).settled()
        values = ask(comparison, target, on_cpu, progress=progress)
    return Verification(
        simulated=simulated,
        gradients=values.gradients,
        losses=values.losses,
        outputs=values.outputs,
        sizes=values.sizes,
        numerics=plan.numerics,
        skipped=values.skipped,
        notes=(*notes, *values.notes),
        measured=measured,
    )


def _verified_program(
    file: Path, plan: Plan, options: VerifyOptions, gpu: GpuSpec | None, progress: Progress | None
) -> Verification:
    """Hold the plan of a program against runs of the program."""
    from vramfit.gpus import find_gpu
    from vramfit.planner.verification import ValuesCheck, Verification
    from vramfit.planner.verify_questions import PlanMemoryQuestion, ProgramValuesQuestion

    if options.sizes or options.card:
        raise UsageError(
            "the plan is for a program, whose batches are its own and which runs on a card by itself",
            "Leave --size and --card out; python -m vramfit.with_plan runs it on a card and says what was seen",
        )
    card = gpu or find_gpu(plan.aim.device)
    space = MemoryBudget(gpu=card, budget=plan.aim.budget_bytes, margin=plan.aim.margin_bytes).settled()
    planned, program = os.path.abspath(file), plan.aim.program
    simulated = None
    if options.memory:
        memory = PlanMemoryQuestion(plan=planned)
        simulated = answered(memory, "", space, progress=progress, program=program).found
    values = ValuesCheck(sizes=plan.aim.sizes, skipped="not asked for")
    if options.values:
        asked = ProgramValuesQuestion(plan=planned, steps=options.steps, seconds=options.seconds)
        values = answered(asked, "", space, progress=progress, program=program).found
    return Verification(
        simulated=simulated,
        gradients=values.gradients,
        losses=values.losses,
        sizes=values.sizes,
        numerics=plan.numerics,
        skipped=values.skipped,
        notes=values.notes,
    )


def _measured(
    target: str, memory: MemoryBudget, plan: Plan, file: str, card: bool | None, progress: Progress | None
) -> tuple[Measured | None, tuple[str, ...]]:
    """A plan on this machine's card, or a note that says why it was not run there."""
    from vramfit.planner.verification import Measured
    from vramfit.planner.verify_questions import AskedRun

    sizes, limit = dict(plan.aim.sizes), plan.aim.budget_bytes - plan.aim.margin_bytes
    runs = (
        AskedRun(name="plain", sizes=sizes),
        AskedRun(name="planned", plan=file, sizes=sizes, limit=limit),
    )
    made = measure_in_child(target, memory, runs, card=card, progress=progress)
    if made.skipped:
        return None, (f"not measured: {made.skipped}",)
    before, after = made.runs
    return Measured(
        card=made.card,
        before=before,
        after=after,
        planned=plan.after,
        limit_bytes=limit,
        left_bytes=made.left_bytes,
    ), ()
