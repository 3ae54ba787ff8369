"""Opens the virtual card on which a program is planned for, and has a first look at the program there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from vramfit.errors import UsageError
from vramfit.launch.offline import OFFLINE, refuse_connections
from vramfit.options.run_options import RunOptions
from vramfit.planner.planner_job import DeviceMemory
from vramfit.planner.scripts.script_backend import ScriptBackend
from vramfit.planner.scripts.script_comparison import compare_program
from vramfit.planner.scripts.script_workload import ScriptWorkload


def opened_program(
    memory: DeviceMemory,
    program: Sequence[str],
    run: RunOptions | None,
    progress: Callable[[str], None],
    *,
    trained: bool = True,
) -> tuple[ScriptBackend, ScriptWorkload]:
    """Where a program is run with techniques, and the program as a workload.

    Args:
        run: how it is run beside its card.
        trained: whether it has to train a model.

    Raises:
        UsageError: no virtual card is meant, or the program trains no model that techniques can be attached to.
        VramfitError: the program fails.
    """
    if memory.device != "cuda" or memory.gpu is None:
        raise UsageError("a program is planned for on a virtual card", "Choose it: --gpu NAME")
    options = replace(run or RunOptions(), gpu=memory.gpu, alloc_conf=memory.alloc_conf)
    device = ScriptBackend(options, program, host_bytes=memory.host_bytes)
    # The program is run many times here: what it sends to others, it would send as often.
    os.environ.update(OFFLINE)
    refuse_connections()
    progress("what the program trains")
    return device, device.workload(compare_program, trained=trained)
