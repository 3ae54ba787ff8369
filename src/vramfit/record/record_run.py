"""Records a program in a child interpreter of its own: on the card of this machine, or metered on its CPU. No torch."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vramfit.errors import UsageError
from vramfit.launch.limits import NO_LIMITS, Limits
from vramfit.launch.runner import run_job
from vramfit.record.record_job import AUTO, RecordJob
from vramfit.trace import Run

CPU = "cpu"
MAX_ENTRIES = 1_000_000
"""Events that a recording of a card keeps unless told otherwise: the last ones."""

# Which of the two counts depends on the release of torch; the same in both is right for all.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def record_in_child(
    command: Sequence[str],
    *,
    device: str = AUTO,
    budget: int | None = None,
    alloc_conf: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    max_entries: int = MAX_ENTRIES,
    journal: Path | None = None,
    limits: Limits = NO_LIMITS,
    host_memory: bool = False,
) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, and record its memory.

    The program's input and output are this process's own. Its exit code is in the result; where it was killed, the
    result is what had happened until then.

    Args:
        command: what python would be given.
        device: ``auto`` and ``cuda`` for the card, ``cuda:1`` for a certain one, ``cpu`` to meter the CPU's tensors.
        budget: bytes that the program may hold; past them a request raises ``torch.OutOfMemoryError``.
        alloc_conf: allocator settings; None leaves them to the environment.
        environ: variables added to this process's.
        cwd: folder to run in; None for the current one.
        max_entries: events kept of a card.
        journal: where the trace of a metered program is written while it happens, for the case that this process is
            killed too; None keeps it in a temporary folder.
        limits: when the program is ended.
        host_memory: whether to follow the host's memory too, which costs time.

    Raises:
        UsageError: there is no such device here.
        VramfitError: the child died before the program started.
    """
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device) is None:
        raise UsageError(
            f"device={device!r} is no device that can be recorded", 'Give "cuda", "cuda:1" or "cpu"'
        )
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        job = RecordJob(
            command=list(command),
            folder=folder,
            alloc_conf=alloc_conf,
            journal=None if journal is None else os.path.abspath(journal),
            device=device,
            budget=budget,
            max_entries=max_entries,
            limits=limits,
            host_memory=host_memory,
        )
        settings = {} if alloc_conf is None else dict.fromkeys(_SETTINGS, alloc_conf)
        return run_job("vramfit.record.record_child", job, environ={**settings, **(environ or {})}, cwd=cwd)
