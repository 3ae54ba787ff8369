"""Records a program in a child interpreter: on the card of this machine, or metered on its CPU. No torch."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from vramfit.errors import UsageError
from vramfit.launch.program_job import ProgramJob, ProgramOptions
from vramfit.launch.runner import run_job
from vramfit.trace import Run

AUTO, CPU = "auto", "cpu"
"""Devices: the card of this machine, and its CPU, metered."""

MAX_ENTRIES = 1_000_000
"""Events that a recording of a card keeps unless another number is given: the last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun(ProgramOptions):
    """How a program is recorded.

    Attributes:
        device: ``auto`` and ``cuda`` for the card, ``cuda:1`` for a certain one, ``cpu`` to meter the CPU's tensors.
        budget: bytes that the program may hold; past them a request raises ``torch.OutOfMemoryError``.
        max_entries: events kept of a card.
    """

    device: str = AUTO
    budget: int | None = None
    max_entries: int = MAX_ENTRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordJob(ProgramJob):
    """A program to record.

    Attributes:
        device: ``auto``, ``cuda``, ``cuda:1`` or ``cpu``.
    """

    device: str
    budget: int | None
    max_entries: int


# Which of the two counts depends on the release of torch; the same in both is right for all.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def record_in_child(command: Sequence[str], options: RecordedRun) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, and record its memory.

    The program's input and output are this process's own. Its exit code is in the result; where it was killed, the
    result is what had happened until then.

    Raises:
        UsageError: there is no such device here.
        VramfitError: the child died before the program started.
    """
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", options.device) is None:
        raise UsageError(
            f"device={options.device!r} is not a device that can be recorded",
            'Give "cuda", "cuda:1" or "cpu"',
        )
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        job = RecordJob(
            folder=folder,
            command=list(command),
            alloc_conf=options.alloc_conf,
            journal=None if options.journal is None else os.path.abspath(options.journal),
            limits=options.limits,
            host_memory=options.host_memory,
            ends_line=options.ends_line,
            device=options.device,
            budget=options.budget,
            max_entries=options.max_entries,
        )
        conf = options.alloc_conf
        settings = {} if conf is None else dict.fromkeys(_SETTINGS, conf)
        environ = {**settings, **(options.environ or {})}
        return run_job("vramfit.record.record_child", job, environ=environ, cwd=options.cwd)
