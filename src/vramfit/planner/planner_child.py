"""The child of the planner: loads a workload, does one task with it, and writes down what came out.

Started as ``python -m vramfit.planner.planner_child FOLDER``, where the folder holds ``job.json``. A process of its
own, since a virtual GPU needs an interpreter in which nothing has gone backward yet, and the workload's file is the
user's code.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vramfit.files import Writes, make_policy, protect
from vramfit.files.protection import stand
from vramfit.launch.interrupts import note_interrupts
from vramfit.launch.job import job_file, tell
from vramfit.launch.running import leave_after
from vramfit.plain import from_plain
from vramfit.planner import tasks
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.memory_budget import DeviceMemory
from vramfit.planner.planner_job import (
    Answer,
    ConfirmJob,
    FitJob,
    MeasureJob,
    PlanJob,
    PlannerJob,
    VerifyMemoryJob,
    VerifyValuesJob,
)
from vramfit.planner.search_evidence import Evidence
from vramfit.planner.workload_check import failure_of_task
from vramfit.workload import Workload, load_workload

_INTERRUPTED = 130
_REAL = ("cpu", "card")
"""Devices on which a workload really runs."""

_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that warn when torchao is imported, of compiled extensions and of its own enumerations."""

TASKS: dict[str, tuple[type[PlannerJob], Callable[..., Any]]] = {
    "plan": (PlanJob, tasks.plan),
    "fit": (FitJob, tasks.fit),
    "confirm": (ConfirmJob, tasks.confirm),
    "measure": (MeasureJob, tasks.measure),
    "verify-memory": (VerifyMemoryJob, tasks.verify_memory),
    "verify-values": (VerifyValuesJob, tasks.verify_values),
}
"""The kinds of job, and what does each."""


def main(name: str) -> int:
    """Do the job of a folder; 0 where results or what went wrong were written."""
    folder, parent = Path(name), os.getppid()
    note_interrupts(folder)
    values = json.loads(job_file(folder).read_text(encoding="utf-8"))
    kind, task = TASKS[values["task"]]
    job = from_plain(values, kind)

    def progress(text: str) -> None:
        if os.getppid() != parent:
            raise SystemExit("the process that asked for a plan has gone")
        tell(folder, text)

    for talkative in _TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.ERROR)
    try:
        if job.memory.device not in _REAL:
            _protect_files(folder)
        card_here = job.memory.device == "cuda" and _card_here()
        if isinstance(job, PlanJob) and job.memory.device == "cuda":
            evidence = Evidence(job, folder)
            evidence.watch()
            task = partial(task, evidence=evidence)
        device, load = _device(job.memory)
        found = task(load(job.target), device, job, progress)
        job.answer(Answer(found=found, card_here=card_here))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        failure_of_task(error, job.target).write(folder)
    return 0


def _protect_files(folder: Path) -> None:
    """Keep what the workload's code writes on a virtual card from the user's files; see docs/files.md."""
    policy = make_policy(Writes.DISCARD, workplace=folder)
    stand(protect(policy, in_child=True))


def _card_here() -> bool:
    """Whether torch sees a real card, asked before the virtual one is there. Wakes no card up."""
    import torch

    return torch.cuda.is_available()


def _device(memory: DeviceMemory) -> tuple[DeviceBackend, Callable[[str], Workload]]:
    """Where steps are run, and what reads the workload's file there."""
    if memory.device == "cpu":
        from vramfit.planner.devices.cpu_backend import CpuBackend

        return CpuBackend(), load_workload
    if memory.device == "card":
        from vramfit.planner.devices.card_backend import card_of_this_process

        return card_of_this_process(memory.host_bytes), load_workload
    from vramfit.planner.devices.virtual_backend import VirtualBackend
    from vramfit.virtual.gpu import VirtualGPU

    spec = memory.gpu
    assert spec is not None

    def load(target: str) -> Workload:
        with VirtualGPU(spec):  # a file may ask for the card while it is read
            return load_workload(target)

    device = VirtualBackend(
        spec, alloc_conf=memory.alloc_conf, host_bytes=memory.host_bytes, own_process=True
    )
    return device, load


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
