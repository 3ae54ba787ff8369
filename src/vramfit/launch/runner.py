"""The parent's side of a run: starts the child, passes signals on, and collects what it left. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vramfit.errors import EnvironmentUnfitError, TraceFormatError, VramfitError
from vramfit.launch.interrupts import INTERRUPTED, Signals, passed_on, run_child
from vramfit.launch.job import Stage, failure_of, stage_of
from vramfit.launch.program_job import PARTIAL, ProgramJob, load_run
from vramfit.launch.starting import own_options, python_command
from vramfit.launch.supervising import EXIT_CODES, Supervisor
from vramfit.trace import Run, read_any
from vramfit.trace.partial import partial_run
from vramfit.trace.progress import End, Progress


def run_job(
    child: str, job: ProgramJob, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Run:
    """Run a job in a child interpreter; the program's input and output are this process's own.

    A child that is killed while the program runs leaves what it wrote until then: that is the run then, with a
    negative exit code and a warning.

    Args:
        child: the module that runs it, as ``python -m`` is given it.
        job: what to run; its folder must exist.
        environ: variables added to this process's.
        cwd: folder to run in; None for the current one.

    Raises:
        EnvironmentUnfitError: this torch or this machine cannot run the job as asked.
        UsageError: the child found something wrong with its settings.
        VramfitError: the child died before it could tell its results; the message says how.
        KeyboardInterrupt: the child was interrupted before the program started.
        SystemExit: the child was ended by SIGTERM before the program started.
    """
    folder = Path(job.folder)
    with passed_on(folder) as signals:
        supervisor = Supervisor(folder, job.limits, signals)
        code = _spawn(child, job.write(), environ, cwd, signals, supervisor)
    if (failure := failure_of(folder)) is not None:
        raise failure.error()
    outcome, stage = load_run(folder), stage_of(folder)
    if outcome is None and signals.interrupted and stage is not Stage.RUNNING:
        raise KeyboardInterrupt
    if outcome is None and signals.terminated is not None and stage is not Stage.RUNNING:
        raise SystemExit(128 + signals.terminated)
    return outcome or _recover(job, stage, code, _progress(supervisor, signals, code))


def _progress(supervisor: Supervisor, signals: Signals, code: int) -> Progress:
    """How far a child came that left no results."""
    found = supervisor.progress
    if found.is_cut:
        return found
    if code == -signal.SIGTERM:
        return replace(found, end=End.TERMINATED)
    return replace(found, end=End.INTERRUPTED) if signals.interrupted and code == INTERRUPTED else found


def _recover(job: ProgramJob, stage: Stage | None, code: int, progress: Progress) -> Run:
    """What a process that was killed had written down."""
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
) -> int:
    arguments = python_command(module, str(job_file), options=own_options())
    return run_child(
        arguments, signals, watch=supervisor.watch, env={**os.environ, **(environ or {})}, cwd=cwd
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
            "Use a torch release from 2.11 on, from PyPI, on Linux; or report this version.",
        )
    if stage is Stage.RUNNING:
        error = VramfitError(
            f"the program's process {how}, so there is no report",
            "If it ends itself by a signal, let it return instead.",
        )
        error.exit_code = 128 - code if code < 0 else code or 1
        return error
    return VramfitError(
        f"the child interpreter {how} before the program started", "Is torch installed beside vramfit?"
    )
