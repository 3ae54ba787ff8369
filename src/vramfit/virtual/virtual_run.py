"""Runs a program on the virtual GPU in a child interpreter of its own. Imports no torch itself."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vramfit.arguments import path_argument
from vramfit.files import make_policy
from vramfit.files.namespace import attended
from vramfit.files.protection import recovered
from vramfit.gpus.measured_profile import NO_PROFILE, OWN_PROFILE, check_card, load_profile
from vramfit.launch.runner import run_job
from vramfit.trace import Run
from vramfit.virtual.virtual_job import VirtualJob, VirtualRun


def run_in_child(command: Sequence[str], options: VirtualRun) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, on virtual GPUs.

    The program's input and output are this process's own. Its exit code is in the result.

    Args:
        command: what python would be given.
        options: the cards, and how the program is run on them.

    Raises:
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
        UsageError: the profile cannot be read, or is of another card.
        VramfitError: the child died before it could tell its results; the message says how.
    """
    profile = path_argument("profile", options.profile)
    if profile not in (NO_PROFILE, OWN_PROFILE):
        check_card(load_profile(Path(profile)), options.gpu)  # a wrong one is refused before anything starts
        profile = os.path.abspath(profile)
    with tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True) as folder:
        journal = None if options.journal is None else os.path.abspath(options.journal)
        if journal is not None:
            with contextlib.suppress(OSError):  # the child says what is wrong with it
                # A namespace lets through what is there: it is read when the child was killed.
                Path(journal).touch()
        policy = make_policy(
            options.writes,
            workplace=folder,
            through=options.through,
            ours=[*options.ours, *([] if journal is None else [journal])],
            beside=options.cwd,
            backend=options.backend,
        )
        job = VirtualJob(
            folder=folder,
            command=list(command),
            alloc_conf=options.alloc_conf,
            journal=journal,
            limits=options.limits,
            host_memory=options.host_memory,
            gpu=options.gpu,
            gpus=options.gpus,
            assume=options.assume,
            profile=profile,
            files=policy,
        )
        with attended(policy):
            run = run_job("vramfit.virtual.virtual_child", job, environ=options.environ, cwd=options.cwd)
            return run if run.files is not None else replace(run, files=recovered(policy))
