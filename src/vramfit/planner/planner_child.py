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
from pathlib import Path
from typing import Any

from vramfit.files import Writes, make_policy, protect
from vramfit.files.protection import stand
from vramfit.gpus import GpuSpec
from vramfit.launch.interrupts import note_interrupts
from vramfit.launch.job import tell
from vramfit.launch.running import leave_after
from vramfit.plain import from_plain
from vramfit.planner import tasks
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.search_evidence import Evidence
from vramfit.planner.workload_check import failure_to_plain
from vramfit.workload import Workload
from vramfit.workload.loading import load_workload

_INTERRUPTED = 130
_REAL = ("cpu", "card")
"""Devices on which a workload really runs."""

_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that warn when torchao is imported, of compiled extensions and of its own enumerations."""

TASKS: dict[
    str, Callable[[Workload, DeviceBackend, dict[str, Any], Callable[[str], None]], dict[str, Any]]
] = {
    "plan": tasks.plan,
    "fit": tasks.fit,
    "confirm": tasks.confirm,
    "measure": tasks.measure,
    "verify-memory": tasks.verify_memory,
    "verify-values": tasks.verify_values,
}


def main(name: str) -> int:
    """Do the job of a folder; 0 where results or what went wrong were written."""
    folder, parent = Path(name), os.getppid()
    note_interrupts(folder)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))

    def progress(text: str) -> None:
        if os.getppid() != parent:
            raise SystemExit("the process that asked for a plan has gone")
        tell(folder, text)

    for talkative in _TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.ERROR)
    try:
        if job["device"] not in _REAL:
            _protect_files(folder)
        card_here = job["device"] == "cuda" and _card_here()
        if job["device"] == "cuda" and job["task"] == "plan":
            evidence = Evidence(job, folder)
            evidence.watch()
            job["evidence"] = evidence
        device, load = _device(job)
        workload = load(job["target"])
        found = TASKS[job["task"]](workload, device, job, progress)
        _write(folder / "found.json", found | {"card_here": card_here})
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        _write(folder / "failed.json", failure_to_plain(error, job["target"]))
    return 0


def _protect_files(folder: Path) -> None:
    """Keep what the workload's code writes on a virtual card from the user's files; see docs/files.md."""
    policy = make_policy(Writes.DISCARD, workplace=folder)
    stand(protect(policy, in_child=True))


def _card_here() -> bool:
    """Whether torch sees a real card, asked before the virtual one is there. Wakes no card up."""
    import torch

    return torch.cuda.is_available()


def _device(job: dict[str, Any]) -> tuple[DeviceBackend, Callable[[str], Workload]]:
    """Where steps are run, and what reads the workload's file there."""
    if job["device"] == "cpu":
        from vramfit.planner.devices.cpu_backend import CpuBackend

        return CpuBackend(), load_workload
    if job["device"] == "card":
        from vramfit.planner.devices.card_backend import card_of_this_process

        return card_of_this_process(job["host_bytes"]), load_workload
    from vramfit.planner.devices.virtual_backend import VirtualBackend
    from vramfit.virtual.gpu import VirtualGPU

    spec = from_plain(job["gpu"], GpuSpec)

    def load(target: str) -> Workload:
        with VirtualGPU(spec):  # a file may ask for the card while it is read
            return load_workload(target)

    device = VirtualBackend(
        spec, alloc_conf=job["alloc_conf"], host_bytes=job["host_bytes"], own_process=True
    )
    return device, load


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
