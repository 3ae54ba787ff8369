"""Asks questions of a process of the planner: starts the child, listens to it, and reads its answer. Imports no torch.

Each question has a process of its own, or several share one that stays (resident_child.py).
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from vramfit.errors import VramfitError
from vramfit.files import Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.launch.interrupts import passed_on, run_child
from vramfit.launch.job import Failure, failure_of, listening, result_of
from vramfit.launch.starting import python_command
from vramfit.options.run_options import RunOptions
from vramfit.plain import to_plain
from vramfit.planner.planner_job import Answer, DeviceMemory, PlannerJob
from vramfit.planner.planner_questions import PlannerQuestion, Result, name_of, question_type
from vramfit.planner.search_evidence import earlier_searches
from vramfit.torch_internals.releases import refuse_older
from vramfit.workload import split_target

Progress = Callable[[str], object]

STANDARD_ERROR = 2
"""What a workload prints goes there: standard output is for results."""

_SILENT = "6"
"""Above all levels of libkineto, whose profiler announces each start and stop (ILoggerObserver.h)."""

_PATIENCE = 10.0
"""Seconds that a child has to write down what it found, after it was interrupted because its time was over."""

_answers: dict[str, Any] = {}
"""What was found in this process about models of its own, by what was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTarget:
    """What was put down for another process.

    Attributes:
        target: as ``FILE.py:NAME``.
        digest: of all that it holds, by which the same is known again.
    """

    target: str
    digest: str


class Subject(Protocol):
    """What questions are about that is no workload's file, e.g. a model of this process."""

    def memory(self) -> DeviceMemory:
        """Where it is to fit."""
        ...

    def packed(self, question: Any, folder: Path) -> PackedTarget:
        """Put it down in a folder, with what is asked about it.

        Raises:
            UsageError: it cannot go to another process.
        """
        ...


def ask(
    question: PlannerQuestion[Result],
    about: str | Subject,
    memory: DeviceMemory | None = None,
    *,
    progress: Progress | None = None,
    seconds: float | None = None,
) -> Result:
    """What another process answers; the same about the same model is asked once in a process.

    Args:
        about: a workload, as ``FILE.py:NAME``, or a model of this process.
        memory: where it is to fit; None for what the model itself says.
        progress: called with what is being done.
        seconds: after which the question is given up; None for as long as it takes.

    Raises:
        UsageError: there is no such file, the model or the question cannot go to another process, or nothing fits.
        VramfitError: the workload fails, the child died, or the time was over before it had an answer.
        KeyboardInterrupt: it was interrupted.
    """
    if isinstance(about, str):
        assert memory is not None
        return answered(question, about, memory, progress=progress, seconds=seconds).found
    memory = about.memory() if memory is None else memory
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        packed = about.packed(question, Path(name))
        job = PlannerJob(
            question=name_of(question), target=packed.target, memory=memory, asked_at=time.time()
        )
        return once(
            packed, job, lambda: _found(run_job(job, question.result_type(), progress, seconds)).found
        )


def answered(
    question: PlannerQuestion[Result],
    target: str,
    memory: DeviceMemory,
    *,
    progress: Progress | None = None,
    seconds: float | None = None,
    program: Sequence[str] = (),
) -> Answer[Result]:
    """`ask` about a workload's file, or about a program, with what else the child says."""
    job = job_of(question, target, memory, program=program)
    return _found(run_job(job, question.result_type(), progress, seconds))


def job_of(
    question: PlannerQuestion[Any],
    target: str,
    memory: DeviceMemory,
    *,
    fresh: bool = False,
    program: Sequence[str] = (),
    run: RunOptions | None = None,
) -> PlannerJob:
    """The job that carries a question of plain values.

    Args:
        program: the command line of the program that it is about, in place of a workload.
        run: how it is run.
        fresh: whether what earlier searches saw is left aside.
    """
    return PlannerJob(
        question=name_of(question),
        values=to_plain(question),
        target=target,
        program=tuple(program),
        run=run,
        memory=memory,
        fresh=fresh,
        asked_at=time.time(),
    )


def once(packed: PackedTarget, job: PlannerJob, find: Callable[[], Result]) -> Result:
    """What a job about a packed model finds, or found before in this process."""
    words = repr(replace(job, target="", folder="", asked_at=0.0))
    key = hashlib.sha256(f"{packed.digest} {words}".encode()).hexdigest()
    if key not in _answers:
        _answers[key] = find()
    found: Result = _answers[key]
    return found


def _found(answer: Answer[Result] | Failure) -> Answer[Result]:
    if isinstance(answer, Failure):
        raise answer.error()
    return answer


def run_job(
    job: PlannerJob, kind: type[Result], progress: Progress | None = None, seconds: float | None = None
) -> Answer[Result] | Failure:
    """Run the child; what it found, or what went wrong.

    Args:
        job: what to do; it is given a folder here.
        kind: of the answer.
        seconds: after which the child is interrupted, as a user would; what it has found until then counts.

    Raises:
        UsageError: there is no such file.
        VramfitError: the child died, or had no answer in time.
        KeyboardInterrupt: it was interrupted.
    """
    if not job.program:
        split_target(job.target)
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        folder, device = Path(name), job.memory.device
        replace(job, folder=name).write()
        policy = make_policy(Writes.DISCARD, workplace=folder)  # as the child makes it
        limit = None if seconds is None else _TimeLimit(seconds)
        with (
            _keeping(folder, job),
            attended(policy),
            passed_on(folder) as signals,
            listening(folder, progress),
        ):
            refuse_older()
            command = child_command(folder, device)
            output = subprocess.DEVNULL if sys.stderr is None else STANDARD_ERROR  # closed from the start
            watch = None if limit is None else limit.watch
            code = run_child(command, signals, watch=watch, stdout=output, env=child_environ(job.memory))
        answer: Answer[Result] | None = result_of(folder, Answer[kind])  # type: ignore[valid-type]
        if signals.interrupted and (code or answer is None):  # a search has a plan even so
            raise KeyboardInterrupt
        if signals.terminated is not None:
            raise SystemExit(128 + signals.terminated)
        if (failure := failure_of(folder)) is not None:
            return failure
        if limit is not None and limit.over and answer is None:
            raise VramfitError(
                f"there was no answer within {seconds:g} seconds", "Allow more time, or ask for less"
            )
        if code or answer is None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise VramfitError(f"the planner's process {how}", "The lines above say why")
        return answer


def _keeping(folder: Path, job: PlannerJob) -> AbstractContextManager[None]:
    """What lays earlier searches into a job's folder, for a question that keeps them."""
    if not job.program and job.memory.device == "cuda" and question_type(job.question).keeps_searches:
        return earlier_searches(folder, job)
    return nullcontext()


class _TimeLimit:
    """Interrupts a child when its time is over, and ends it when it takes no notice."""

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._until = time.monotonic() + seconds

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Look at the clock."""
        if time.monotonic() < self._until:
            return
        if not self.over:
            self.over = True
            self._until += _PATIENCE
            child.send_signal(signal.SIGINT)
        else:
            child.terminate()


def child_command(folder: Path, device: str) -> list[str]:  # noqa: ARG001  # tests put another card in the place of one
    """The command line of the child for a folder with a job."""
    return python_command("vramfit.planner.planner_child", str(folder))


def child_environ(memory: DeviceMemory) -> dict[str, str]:
    """The child's variables: a real allocator reads its settings from there, and the profiler what it may print."""
    environ = dict(os.environ)
    if memory.device == "cpu":
        environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    if memory.device == "card" and memory.alloc_conf is not None:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"] = memory.alloc_conf
    return environ
