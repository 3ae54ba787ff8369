"""Runs a program on the virtual GPU in a child interpreter of its own. Imports no torch itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from vramfit.errors import EnvironmentUnfitError, VramfitError
from vramfit.gpus import GpuSpec
from vramfit.gpus.profile import NO_PROFILE, OWN_PROFILE, check_card, load_profile
from vramfit.trace import Run
from vramfit.virtual.job import Job, Stage, load_outcome, plain_spec, raise_failure, stage_of


def run_in_child(
    command: Sequence[str],
    *,
    gpu: GpuSpec,
    gpus: int = 1,
    alloc_conf: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    assume: str = "upper",
    profile: str | os.PathLike[str] = OWN_PROFILE,
) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, on virtual GPUs.

    The program's input and output are this process's own. Its exit code is in the result.

    Args:
        command: what python would be given.
        gpu: the card.
        gpus: how many of them.
        alloc_conf: allocator settings; None leaves them to the environment.
        environ: variables added to this process's.
        cwd: folder to run in; None for the current one.
        assume: ``upper`` or ``typical``, for sizes that depend on data.
        profile: a file of `vramfit calibrate`, ``none``, or ``auto`` for that of this card and torch.

    Raises:
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
        UsageError: the profile cannot be read, or is of another card.
        VramfitError: the child died before it could tell its results; the message says how.
    """
    named = os.fspath(profile)
    if named not in (NO_PROFILE, OWN_PROFILE):
        check_card(load_profile(Path(named)), gpu)  # a wrong one is refused before anything starts
        named = os.path.abspath(named)
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        folder = Path(name)
        job = Job(
            command=list(command),
            gpu=plain_spec(gpu),
            gpus=gpus,
            alloc_conf=alloc_conf,
            folder=name,
            assume=assume,
            profile=named,
        )
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        code = _spawn(folder / "job.json", environ, cwd)
        raise_failure(folder)
        run = load_outcome(folder)
        if run is None:
            raise _explain(stage_of(folder), code)
        return run


def _spawn(job_file: Path, environ: Mapping[str, str] | None, cwd: Path | None) -> int:
    # -P: the current folder must not shadow our own imports; the child then builds the program's sys.path.
    arguments = [sys.executable, *_interpreter_options(), "-P", "-m", "vramfit.virtual.child", str(job_file)]
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
    import threading

    return threading.current_thread() is threading.main_thread()


def _interpreter_options() -> list[str]:
    """Options of this interpreter (``-W``, ``-O``, ``-X``) that the program would have had."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def _explain(stage: Stage | None, code: int) -> VramfitError:
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
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
