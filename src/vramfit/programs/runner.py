"""The parent's side of a run: starts the child, passes signals on, and collects what it left. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from vramfit.errors import EnvironmentUnfitError, TraceFormatError, VramfitError
from vramfit.programs.job import PARTIAL, Job, Stage, load_outcome, raise_failure, stage_of
from vramfit.trace import Run, read_any
from vramfit.trace.partial import partial_run


def run_job(
    child: str, job: Job, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
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
        EnvironmentUnfitError: this torch or this machine cannot run it as asked.
        UsageError: likewise, for what the child found wrong with its settings.
        VramfitError: the child died before it could tell its results; the message says how.
    """
    folder = Path(job.folder)
    code = _spawn(child, job.write(), environ, cwd)
    raise_failure(folder)
    return load_outcome(folder) or _recover(job, stage_of(folder), code)


def _recover(job: Job, stage: Stage | None, code: int) -> Run:
    """What a process that was killed had written down."""
    for file in (Path(job.folder) / PARTIAL, job.journal_file):
        if stage is Stage.RUNNING and file.exists():
            with contextlib.suppress(TraceFormatError):
                trace = read_any(file)
                return partial_run(trace, exit_code=code, how=_how(code), program=tuple(job.command))
    raise _explain(stage, code)


def _spawn(module: str, job_file: Path, environ: Mapping[str, str] | None, cwd: Path | None) -> int:
    # -P: the current folder must not shadow our own imports; the child then builds the program's sys.path.
    arguments = [sys.executable, *_interpreter_options(), "-P", "-m", module, str(job_file)]
    with subprocess.Popen(arguments, env={**os.environ, **(environ or {})}, cwd=cwd) as child:

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            child.send_signal(number)

        before = signal.getsignal(signal.SIGTERM)
        main_thread = _on_main_thread()
        if main_thread:
            signal.signal(signal.SIGTERM, forward)
        try:
            return _wait(child)
        finally:
            if main_thread:
                signal.signal(signal.SIGTERM, before)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child. An interrupt from the keyboard reaches it too: it ends by itself and tells its results."""
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _interpreter_options() -> list[str]:
    """Options of this interpreter (``-W``, ``-O``, ``-X``) that the program would have had."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


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
