"""Runs a program on the virtual GPU in a child interpreter of its own. Imports no torch itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vramfit.gpus import GpuSpec
from vramfit.gpus.profile import NO_PROFILE, OWN_PROFILE, check_card, load_profile
from vramfit.programs.runner import run_job
from vramfit.trace import Run
from vramfit.virtual.job import VirtualJob, plain_spec


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
    journal: Path | None = None,
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
        journal: where the trace is written while it happens, for the case that this process is killed too; None
            keeps it in a temporary folder.

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
        job = VirtualJob(
            command=list(command),
            gpu=plain_spec(gpu),
            gpus=gpus,
            alloc_conf=alloc_conf,
            folder=name,
            assume=assume,
            profile=named,
            journal=None if journal is None else os.path.abspath(journal),
        )
        return run_job("vramfit.virtual.child", job, environ=environ, cwd=cwd)
