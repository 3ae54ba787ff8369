"""How a program is run on virtual GPUs, and the job of the child interpreter that runs it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vramfit.arguments import path_argument
from vramfit.cudnn.asker import wanted_cudnn
from vramfit.files import Backend, FilePolicy, Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.files.protection import recovered
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import NO_PROFILE, OWN_PROFILE, check_card, load_profile
from vramfit.launch.program_job import ProgramJob, ProgramOptions
from vramfit.launch.runner import run_job
from vramfit.trace import CardLimit, Run
from vramfit.virtual.ranks.rank_place import RankPlace

MOST_GPUS = 8
"""Virtual GPUs of one process (c10/core/impl/FakeGuardImpl.h: kFakeGuardImplMaxDevices)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRun(ProgramOptions):
    """How a program is run on virtual GPUs.

    Attributes:
        gpu: the card.
        gpus: how many of them.
        assume: ``upper`` or ``typical``, for sizes that depend on data.
        profile: a file of `vramfit calibrate`, ``none``, or ``auto`` for that of this card and torch.
        writes: what happens to files that the program writes: ``discard``, ``keep`` or ``real``.
        through: paths that it writes for real even so.
        ours: the same for a program of vramfit's own, which leaves its results there.
        backend: what keeps its writes from the real files.
        cudnn: an installed cuDNN to be asked, see `VirtualGPU`.
        place: which rank of a distributed program it is; None for one that is its only process. The script finds the
            variables that torchrun sets.
        clock: ``real`` or ``simulated``, what the clocks follow that it reads.
        limit: what becomes of requests for which the card has no room.
        begins_at: with `CardLimit.COLLECTED`, bytes of the card that can be had before garbage is first collected.
        aside: the program gets an empty input, what it prints is dropped, and it reaches no other machine.
    """

    gpu: GpuSpec
    gpus: int = 1
    assume: str = "upper"
    profile: str | os.PathLike[str] = OWN_PROFILE
    writes: Writes | str = Writes.DISCARD
    through: Iterable[str | os.PathLike[str]] = ()
    ours: Iterable[str | os.PathLike[str]] = ()
    backend: Backend | str = Backend.AUTO
    cudnn: str | os.PathLike[str] | None = None
    place: RankPlace | None = None
    clock: str = "real"
    limit: CardLimit = CardLimit.FAILS
    begins_at: int | None = None
    aside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualJob(ProgramJob):
    """A program to run on virtual GPUs.

    Attributes:
        gpu: the card.
        gpus: how many.
        assume: what is taken for sizes that depend on data.
        profile: ``auto``, ``none`` or the full path of a file.
        files: what happens to what it writes.
        cudnn: the cuDNN to be asked, None for none.
        place: which rank of a distributed program it is, None for its only process.
        clock: what the clocks follow that it reads.
        limit: what becomes of requests for which the card has no room.
        begins_at: with `CardLimit.COLLECTED`, bytes of the card that can be had before garbage is first collected.
        offline: the program reaches no other machine.
    """

    gpu: GpuSpec
    gpus: int
    files: FilePolicy
    assume: str = "upper"
    profile: str = OWN_PROFILE
    cudnn: str | None = None
    place: RankPlace | None = None
    clock: str = "real"
    limit: CardLimit = CardLimit.FAILS
    begins_at: int | None = None
    offline: bool = False


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
    cudnn = wanted_cudnn(options.cudnn)
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
            ours=[*options.ours, *([] if journal is None else [journal]), *_mailbox(options.place)],
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
            ends_line=options.ends_line,
            gpu=options.gpu,
            gpus=options.gpus,
            assume=options.assume,
            profile=profile,
            cudnn=cudnn,
            place=options.place,
            clock=options.clock,
            limit=options.limit,
            begins_at=options.begins_at,
            offline=options.aside,
            files=policy,
        )
        with attended(policy):
            run = run_job(
                "vramfit.virtual.virtual_child",
                job,
                environ=options.environ,
                cwd=options.cwd,
                aside=options.aside,
            )
            return run if run.files is not None else replace(run, files=recovered(policy))


def _mailbox(place: RankPlace | None) -> list[str]:
    """Where ranks that run side by side leave objects for one another, if they do."""
    return [] if place is None or place.mailbox is None else [place.mailbox]
