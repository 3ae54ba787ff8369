"""The planner's parent: starts the child, listens to it, and reads what it found. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.errors import UsageError, VramfitError
from vramfit.files import Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.gpus import GpuSpec
from vramfit.launch.interrupts import passed_on, run_child
from vramfit.launch.job import Failure, listening
from vramfit.launch.starting import python_command
from vramfit.plain import from_plain, to_plain
from vramfit.planner.memory_budget import MemoryBudget
from vramfit.planner.search_evidence import earlier_searches
from vramfit.workload.loading import split_target

if TYPE_CHECKING:
    from vramfit.planner.largest_size import LargestSize
    from vramfit.planner.plans import Plan
    from vramfit.planner.search import FrontierPoint
    from vramfit.planner.verification import CardRun, Measured, Verification

Progress = Callable[[str], object]

_STANDARD_ERROR = 2
"""What a workload prints goes there: standard output is for results."""

_SILENT = "6"
"""Above all levels of libkineto, whose profiler tells each of its starts and stops (ILoggerObserver.h)."""


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
class PlanOptions:
    """What is asked of a plan, beside the memory that it may take, and of the search for it.

    Attributes:
        sizes: of the batch, in place of the workload's own.
        numerics: how far results may differ, by name.
        objective: ``throughput``, ``memory``, ``price``, or a size that is made as large as fits.
        allow: names of the techniques to choose from; None for all.
        forbid: names of those to leave out.
        frontier: whether the frontier of memory and time is asked for too.
        time_limit: seconds for one solution of the mixed-integer program.
        search_seconds: for the whole search; None for as long as it takes.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    numerics: str = "rounding"
    objective: str = "throughput"
    allow: Sequence[str] | None = None
    forbid: Sequence[str] = ()
    frontier: bool = False
    time_limit: float = 10.0
    search_seconds: float | None = None

    def job(self) -> dict[str, Any]:
        """As plain values."""
        values: dict[str, Any] = to_plain(self)
        return values


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
        target: ``FILE.py:NAME``.
        memory: what it may take.
        options: what else is asked of the plan and of the search.
        fresh: whether what earlier searches saw is left aside.
        progress: called with what is being done.

    Raises:
        KeyboardInterrupt: it was interrupted before there was a plan.
        UsageError: the workload, a technique or a size is not there, or the workload cannot be planned for.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.plan_file import plan_from_toml
    from vramfit.planner.plans import Plan
    from vramfit.planner.search import FrontierPoint

    job = memory.job() | options.job() | {"task": "plan", "fresh": fresh}
    found = run_task(target, job, progress)
    failed = found.get("failed")
    if failed is not None and "plan" not in found:
        raise _error(failed)
    return Planned(
        plan=plan_from_toml(found["plan"], Plan),
        frontier=tuple(FrontierPoint(**point) for point in found.get("frontier", ())),
        failure=None if failed is None else _error(failed),
    )


def fit_in_child(
    target: str,
    room: MemoryBudget,
    *,
    size: str | None = None,
    sizes: Mapping[str, int] | None = None,
    plan: Path | None = None,
    card: bool | None = None,
    progress: Progress | None = None,
) -> LargestSize:
    """The largest value of a size of ``FILE.py:NAME`` that fits, in a process of its own.

    Args:
        target: ``FILE.py:NAME``.
        room: what it may take.
        size: the name of the size; None for the workload's first.
        sizes: where to begin, and the other sizes.
        plan: to be applied first.
        card: whether what was found is confirmed on this machine's card; None does so if it is of the kind of `room`.
        progress: called with what is done.

    Raises:
        UsageError: the workload or the size is not there, or a card was asked for and there is none.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.largest_size import CardCheck, LargestSize, Try, with_card

    _check_card(card, room.gpu)

    job = room.job() | {
        "task": "fit",
        "size": size,
        "sizes": dict(sizes or {}),
        "plan": None if plan is None else os.path.abspath(plan),
    }
    found = _found(run_task(target, job, progress))
    here = found.pop("card_here")
    largest = LargestSize(**found | {"tries": tuple(Try(**one) for one in found["tries"])})
    if room.gpu is None or not largest.value or not (here if card is None else card):
        return largest
    asked = {"task": "confirm", "size": largest.size, "value": largest.value}
    told = _found(run_task(target, job | asked | _on_card(card), progress))
    del told["card_here"]
    check = CardCheck(**told | {"tries": tuple(Try(**one) for one in told["tries"])})
    return with_card(largest, check)


def measure_in_child(
    target: str,
    room: MemoryBudget,
    runs: Sequence[Mapping[str, Any]],
    *,
    card: bool | None = None,
    progress: Progress | None = None,
) -> tuple[str, tuple[CardRun, ...], int, str]:
    """Run ``FILE.py:NAME`` on this machine's card, plain or with plans, in a process of its own.

    Args:
        target: ``FILE.py:NAME``.
        room: with the card that is meant.
        runs: each with ``name``, ``plan`` (a file, or None), ``sizes`` and ``limit`` (bytes, or None for the card).
        card: True for any card; None refuses one of another kind than that of `room`.
        progress: called with what is done.

    Returns:
        the card's name, the runs, the bytes that outlived theirs, and why none was made (empty where they were).

    Raises:
        UsageError: there is no card, no such workload or no such plan.
        VramfitError: the workload itself fails.
    """
    from vramfit.planner.plan_file import PlanFigures
    from vramfit.planner.verification import CardRun

    job = room.job() | {"task": "measure", "runs": [dict(run) for run in runs]}
    found = _found(run_task(target, job | _on_card(card), progress))
    made = (CardRun(**run | {"figures": PlanFigures(**run["figures"])}) for run in found["runs"])
    return found["card"], tuple(made), found["left_bytes"], found["skipped"]


def _check_card(card: bool | None, gpu: GpuSpec | None) -> None:
    if card and gpu is None:
        raise UsageError(
            "a card was asked for, but this is for the CPU", "Leave --card out, or give --gpu NAME"
        )


def _on_card(card: bool | None) -> dict[str, Any]:
    """The job's device is this machine's card: any if one was asked for, else one of the kind that is meant."""
    return {"device": "card", "any_card": card is True}


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
        file: the plan.
        options: what is compared; None for all of it.
        target: ``FILE.py:NAME``; None for the one that the plan was made for.
        gpu: the virtual card; None for the one that the plan names.
        progress: called with what is done.

    Raises:
        UsageError: there is no such plan or workload, or a card was asked for and there is none.
        VramfitError: the workload itself fails.
    """
    from vramfit.gpus import find_gpu
    from vramfit.planner.devices.cpu_backend import cpu_seconds
    from vramfit.planner.plan_file import PlanFigures
    from vramfit.planner.plans import Plan
    from vramfit.planner.verification import GradientCheck, LossCheck, Simulated, Verification

    options = options or VerifyOptions()
    plan = Plan.load(file)
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
    room = space.job()
    job: dict[str, Any] = {"plan": os.path.abspath(file), "sizes": dict(options.sizes)}
    simulated, measured = None, None
    notes: tuple[str, ...] = ()
    if options.memory:
        found = _found(run_task(target, room | job | {"task": "verify-memory"}, progress))
        simulated = Simulated(
            before=PlanFigures(**found["before"]),
            after=PlanFigures(**found["after"]),
            planned=PlanFigures(**found["planned"]),
            limit_bytes=found["limit_bytes"],
        )
        if gpu is not None and (found["card_here"] if options.card is None else options.card):
            measured, notes = _measured(target, space, plan, os.path.abspath(file), options.card, progress)
    told: dict[str, Any] = {"sizes": plan.aim.sizes, "skipped": "not asked for"}
    if options.values:
        job |= {"steps": options.steps, "seconds": options.seconds}
        job["step_seconds"] = cpu_seconds(plan.before.step_flops)
        cpu = MemoryBudget(gpu=None, budget=plan.aim.budget_bytes).job()
        told = _found(run_task(target, cpu | job | {"task": "verify-values"}, progress))
    gradients, losses = told.get("gradients"), told.get("losses")
    if losses is not None:
        losses |= {name: tuple(losses[name]) for name in ("plain", "planned")}
    return Verification(
        simulated=simulated,
        gradients=None if gradients is None else GradientCheck(**gradients),
        losses=None if losses is None else LossCheck(**losses),
        sizes=told["sizes"],
        numerics=plan.numerics,
        skipped=told["skipped"],
        notes=(*notes, *told.get("notes", ())),
        measured=measured,
    )


def _measured(
    target: str, room: MemoryBudget, plan: Plan, file: str, card: bool | None, progress: Progress | None
) -> tuple[Measured | None, tuple[str, ...]]:
    """A plan on this machine's card, or a note that says why it was not run there."""
    from vramfit.planner.verification import Measured

    sizes, limit = dict(plan.aim.sizes), plan.aim.budget_bytes - plan.aim.margin_bytes
    runs: list[dict[str, Any]] = [
        {"name": "plain", "plan": None, "sizes": sizes, "limit": None},
        {"name": "planned", "plan": file, "sizes": sizes, "limit": limit},
    ]
    name, made, left, skipped = measure_in_child(target, room, runs, card=card, progress=progress)
    if skipped:
        return None, (f"not measured: {skipped}",)
    before, after = made
    return Measured(
        card=name, before=before, after=after, planned=plan.after, limit_bytes=limit, left_bytes=left
    ), ()


def _found(found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        raise _error(found["failed"])
    return found


def _error(told: Mapping[str, Any]) -> VramfitError:
    return from_plain(told, Failure).error()


def run_task(target: str, job: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    """Run the child; what it found, with ``failed`` where something went wrong.

    Raises:
        UsageError: there is no such file.
        VramfitError: the child died.
        KeyboardInterrupt: it was interrupted.
    """
    split_target(target)
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job | {"target": target}), encoding="utf-8")
        policy = make_policy(Writes.DISCARD, workplace=folder)  # as the child makes it
        keeping = (
            earlier_searches(folder, job, target, fresh=job["fresh"])
            if job["task"] == "plan" and job["device"] == "cuda"
            else nullcontext()
        )
        with keeping, attended(policy), passed_on(folder) as signals, listening(folder, progress):
            command = child_command(folder, job["device"])
            output = subprocess.DEVNULL if sys.stderr is None else _STANDARD_ERROR  # closed from the start
            code = run_child(command, signals, stdout=output, env=_environ(job))
        file, failed = folder / "found.json", folder / "failed.json"
        if signals.interrupted and (code or not file.exists()):  # a search has a plan even so
            raise KeyboardInterrupt
        if signals.terminated is not None:
            raise SystemExit(128 + signals.terminated)
        if failed.exists():
            told: dict[str, Any] = json.loads(failed.read_text(encoding="utf-8"))
            return {**told, "failed": told}
        if code or not file.exists():
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise VramfitError(f"the planner's process {how}", "The lines above say why")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def child_command(folder: Path, device: str) -> list[str]:  # noqa: ARG001  # tests put another card in the place of one
    """The command line of the child for a folder with a job."""
    return python_command("vramfit.planner.planner_child", str(folder))


def _environ(job: Mapping[str, Any]) -> dict[str, str]:
    """The child's variables: a real allocator reads its settings from there, and the profiler what it may print."""
    environ = dict(os.environ)
    if job["device"] == "cpu":
        environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    if job["device"] == "card" and job["alloc_conf"] is not None:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"] = job["alloc_conf"]
    return environ
