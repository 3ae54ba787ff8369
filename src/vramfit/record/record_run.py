"""Records a program in a child interpreter: on the card of this machine, or metered on its CPU. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from vramfit.launch.program_job import PLAIN, ChildSettings, ProgramJob
from vramfit.launch.runner import run_job
from vramfit.options.run_options import RunOptions
from vramfit.trace import Run

MAX_ENTRIES = 1_000_000
"""Events that a recording of a card keeps unless another number is given: the last ones."""

# Which of the two counts depends on the release of torch; the same in both is right for all.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def record_in_child(command: Sequence[str], options: RunOptions, settings: ChildSettings = PLAIN) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, and record its memory.

    The program's input and output are this process's own. Its exit code is in the result; where it was killed, the
    result is what had happened until then.

    Raises:
        UsageError: there is no such device here.
        VramfitError: the child died before the program started.
    """
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        job = ProgramJob(
            folder=folder,
            command=list(command),
            options=options,
            journal=None if settings.journal is None else os.path.abspath(settings.journal),
            ends_line=settings.ends_line,
            hooks=tuple(settings.hooks),
        )
        conf = options.alloc_conf
        settings_of_torch = {} if conf is None else dict.fromkeys(_SETTINGS, conf)
        return run_job("vramfit.record.record_child", job, environ=settings_of_torch)
