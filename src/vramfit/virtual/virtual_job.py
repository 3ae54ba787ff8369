"""How a program is run on virtual GPUs, and the job of the child that runs it. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from vramfit.files import Backend, FilePolicy, Writes
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import OWN_PROFILE
from vramfit.launch.program_job import ProgramJob, ProgramOptions

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
        ours: such paths of a program of ours, which leaves its results there.
        backend: what keeps its writes from the real files.
    """

    gpu: GpuSpec
    gpus: int = 1
    assume: str = "upper"
    profile: str | os.PathLike[str] = OWN_PROFILE
    writes: Writes | str = Writes.DISCARD
    through: Iterable[str | os.PathLike[str]] = ()
    ours: Iterable[str | os.PathLike[str]] = ()
    backend: Backend | str = Backend.AUTO


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualJob(ProgramJob):
    """A program to run on virtual GPUs.

    Attributes:
        gpu: the card.
        gpus: how many.
        assume: what is taken for sizes that depend on data.
        profile: ``auto``, ``none`` or the full path of a file.
        files: what happens to what it writes.
    """

    gpu: GpuSpec
    gpus: int
    files: FilePolicy
    assume: str = "upper"
    profile: str = OWN_PROFILE
