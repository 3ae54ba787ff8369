"""Runs a program on the virtual GPU in a child interpreter of its own. Imports no torch itself."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vramfit.arguments import path_argument
from vramfit.files import Backend, Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.files.protection import recovered
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import NO_PROFILE, OWN_PROFILE, check_card, load_profile
from vramfit.launch.limits import NO_LIMITS, Limits
from vramfit.launch.runner import run_job
from vramfit.trace import Run
from vramfit.virtual.virtual_job import VirtualJob, plain_spec


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
    limits: Limits = NO_LIMITS,
    host_memory: bool = False,
    writes: Writes | str = Writes.DISCARD,
    through: Iterable[str | os.PathLike[str]] = (),
    ours: Iterable[str | os.PathLike[str]] = (),
    backend: Backend | str = Backend.AUTO,
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
        limits: when the program is ended.
        host_memory: whether to follow the host's memory too, which costs time.
        writes: what happens to files that the program writes: ``discard``, ``keep`` or ``real``.
        through: paths that it writes for real even so.
        ours: likewise, for a program of ours that leaves its results there.
        backend: what keeps its writes from the real files.

    Raises:
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
        UsageError: the profile cannot be read, or is of another card.
        VramfitError: the child died before it could tell its results; the message says how.
    """
    named = path_argument("profile", profile)
    if named not in (NO_PROFILE, OWN_PROFILE):
        check_card(load_profile(Path(named)), gpu)  # a wrong one is refused before anything starts
        named = os.path.abspath(named)
    with tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True) as name:
        told = None if journal is None else os.path.abspath(journal)
        if told is not None:
            with contextlib.suppress(OSError):  # the child says what is wrong with it
                Path(
                    told
                ).touch()  # a namespace lets through what is there: it is read when the child was killed
        policy = make_policy(
            writes,
            workplace=name,
            through=through,
            ours=[*ours, *([] if told is None else [told])],
            beside=cwd,
            backend=backend,
        )
        job = VirtualJob(
            command=list(command),
            gpu=plain_spec(gpu),
            gpus=gpus,
            alloc_conf=alloc_conf,
            folder=name,
            assume=assume,
            profile=named,
            limits=limits,
            host_memory=host_memory,
            journal=told,
            files=policy.plain(),
        )
        with attended(policy):
            run = run_job("vramfit.virtual.virtual_child", job, environ=environ, cwd=cwd)
            return run if run.files is not None else replace(run, files=recovered(policy))
