"""The parent's side of a run: starts the child, passes signals on, ends it in time, collects what it left. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vramfit.errors import EnvironmentUnfitError, TraceFormatError, VramfitError
from vramfit.launch.interrupts import (
    INTERRUPTED,
    Signals,
    passed_on,
    programs_run,
    run_child,
    signals_noted,
)
from vramfit.launch.job import Stage, failure_of, stage_of
from vramfit.launch.program_job import PARTIAL, ProgramJob, load_run
from vramfit.launch.starting import own_options, python_command
from vramfit.launch.status import ChildState, Order, Status, read_status, write_order
from vramfit.launch.stopping import ORDERS
from vramfit.options.limits import Limits
from vramfit.torch_internals import releases
from vramfit.trace import Run, read_any
from vramfit.trace.outcome import End, Progress
from vramfit.trace.partial import partial_run

# -- The parent's side of an early end: orders a child to end, and kills one that does not ---------------------


_AGAIN = 0.25
"""Seconds after which an order is given once more."""
_DEAF = 2.5
"""Seconds within which an order must be heard."""
_GRACE = 10.0
"""Seconds that a program has for its end: files that it closes, threads that it waits for."""
_SAVING = 180.0
"""Seconds that writing the results of a long run may take."""

EXIT_CODES = {
    End.STEPS: 0,
    End.TIME: 0,
    End.INTERRUPTED: INTERRUPTED,
    End.TERMINATED: -signal.SIGTERM,
}
"""Exit codes of a run that did not end by itself."""


class Supervisor:
    """Watches a child and ends it when that is due."""

    def __init__(self, folder: Path, limits: Limits, signals: Signals) -> None:
        self._folder = folder
        self._limits = limits
        self._signals = signals
        self._began: float | None = None
        self._since: dict[str, float] = {}
        self._order: tuple[Order, End] | None = None
        self._given = 0.0
        self._killed: End | None = None

    @property
    def progress(self) -> Progress:
        """How far the child had come when it last reported, and what ended it."""
        found = read_status(self._folder).progress
        return found if self._killed is None else replace(found, end=self._killed)

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Look at a child, some times a second."""
        status, now = read_status(self._folder), time.monotonic()
        if status.state is ChildState.STARTING:
            return
        self._began = self._began or now
        due = self._due(status, now)
        if due is not None and due != self._order:
            self._order = due
            self._since.pop("order", None)
            write_order(self._folder, *due)
        if self._order is None:
            return
        if self._is_late(status, now):
            self._killed = status.progress.end if status.progress.is_cut else self._order[1]
            kill_with_children(child)
        elif not self._is_heard(status) and now - self._given >= _AGAIN and ORDERS is not None:
            self._given = now
            child.send_signal(ORDERS)

    def _due(self, status: Status, now: float) -> tuple[Order, End] | None:
        """The order that is due now; None for nothing new."""
        end = status.progress.end
        if self._signals.interrupts > 1 and not status.own_interrupt:
            return Order.LEAVE, End.INTERRUPTED
        if not status.own_terminate and signals_noted(self._folder, signal.SIGTERM):
            return Order.LEAVE, End.TERMINATED
        if status.state is ChildState.STOPPING and now - self._since.setdefault("stopping", now) > _GRACE:
            return Order.LEAVE, end
        if self._order is None and self._limits.seconds is not None and self._began is not None:
            return (Order.STOP, End.TIME) if now - self._began >= self._limits.seconds else None
        return None

    def _is_heard(self, status: Status) -> bool:
        """Whether the child has begun to obey the order."""
        done = (
            ChildState.STOPPING
            if self._order is not None and self._order[0] is Order.STOP
            else ChildState.SAVING
        )
        return status.state >= done

    def _is_late(self, status: Status, now: float) -> bool:
        """Whether the child has used up its time."""
        if status.state is ChildState.SAVING:
            return now - self._since.setdefault("saving", now) > _SAVING
        since = self._since.setdefault("order", now)
        return not self._is_heard(status) and now - since > _DEAF


def kill_with_children(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it has started, as far as the system lists them."""
    family = _descendants(child.pid)
    child.kill()
    for process in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """Processes below a process; none where the system keeps no such lists (see proc(5), ``children``)."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(one) for one in file.read_text(encoding="ascii").split()]
    return found + [below for one in found for below in _descendants(one)]


def run_job(
    child: str,
    job: ProgramJob,
    *,
    environ: Mapping[str, str] | None = None,
    aside: bool = False,
) -> Run:
    """Run a job in a child interpreter; the program's input and output are this process's own.

    A child that is killed while the program runs leaves what it wrote until then, which becomes the run, with a
    negative exit code and a warning.

    Args:
        child: the module that runs the job, as for ``python -m``.
        job: what to run; its folder must exist.
        environ: variables added to this process's; those of the job's options come on top.
        aside: the program gets an empty input, and what it prints is dropped.

    Raises:
        EnvironmentUnfitError: this torch or this machine cannot run the job as asked; no child is started for a torch
            that is too old.
        UsageError: the child found something wrong with its settings.
        VramfitError: the child died before it left results; the message says how.
        KeyboardInterrupt: the child was interrupted before the program started.
        SystemExit: the child was ended by SIGTERM before the program started.
    """
    releases.refuse_older()
    folder = Path(job.folder)
    with passed_on(folder) as signals:
        supervisor = Supervisor(folder, job.options.limits, signals)
        added = {**(environ or {}), **(job.options.environ or {})}
        cwd = None if job.options.cwd is None else Path(job.options.cwd)
        code = _spawn(child, job.write(), added, cwd, signals, supervisor, aside)
    if (failure := failure_of(folder)) is not None:
        raise failure.error()
    outcome, stage = load_run(folder), stage_of(folder)
    began = stage is Stage.RUNNING and read_status(folder).state is not ChildState.STARTING
    if outcome is None and signals.interrupted and not began:
        raise KeyboardInterrupt
    if outcome is None and signals.terminated is not None and not began:
        raise SystemExit(128 + signals.terminated)
    programs_run.append(job.command[0])
    return outcome or _recover(job, stage, code, _progress(supervisor, signals, code))


def _progress(supervisor: Supervisor, signals: Signals, code: int) -> Progress:
    """How far a child without results came."""
    found = supervisor.progress
    if found.is_cut:
        return found
    if code == -signal.SIGTERM:
        return replace(found, end=End.TERMINATED)
    return replace(found, end=End.INTERRUPTED) if signals.interrupted and code == INTERRUPTED else found


def _recover(job: ProgramJob, stage: Stage | None, code: int, progress: Progress) -> Run:
    """The run that a killed process had written down."""
    for file in (Path(job.folder) / PARTIAL, job.journal_file):
        if stage is Stage.RUNNING and file.exists():
            with contextlib.suppress(TraceFormatError):
                trace = read_any(file)
                run = partial_run(trace, exit_code=code, how=_how(code), program=tuple(job.command))
                if progress.is_cut:
                    run = replace(run, exit_code=EXIT_CODES[progress.end], error=None)
                return replace(run, progress=progress)
    raise _explain(stage, code)


def _spawn(
    module: str,
    job_file: Path,
    environ: Mapping[str, str] | None,
    cwd: Path | None,
    signals: Signals,
    supervisor: Supervisor,
    aside: bool,
) -> int:
    arguments = python_command(module, str(job_file), options=own_options())
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL) if aside else {}
    return run_child(
        arguments,
        signals,
        watch=supervisor.watch,
        env={**os.environ, **(environ or {})},
        cwd=cwd,
        **streams,
    )


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"  # one of the real-time signals, which have no names


def _explain(stage: Stage | None, code: int) -> VramfitError:
    how = _how(code)
    if stage is Stage.CHECKING:
        return EnvironmentUnfitError(
            f"the self-check of the virtual GPU {how}: this torch build cannot carry it",
            releases.ADVICE,
        )
    if stage is Stage.RUNNING:
        error = VramfitError(
            f"the program's process {how}, so there is no report",
            "If it ends itself by a signal, let it return instead.",
        )
        error.exit_code = 128 - code if code < 0 else code or 1
        return error
    missing = releases.installed_version() is None
    return VramfitError(
        f"the child interpreter {how} before the program started",
        "Is torch installed beside vramfit?" if missing else "The lines above say why.",
    )
