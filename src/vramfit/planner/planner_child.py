"""The child of the planner: loads a workload, answers a question about it, and writes down what came out.

Started as ``python -m vramfit.planner.planner_child FOLDER``, where the folder holds ``job.json``. A process of its
own, since a virtual GPU needs an interpreter in which nothing has gone backward yet, and the workload's file is the
user's code. It knows no question by name: see planner_questions.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from vramfit.cudnn.asker import ask_early
from vramfit.files import Writes, make_policy, protect
from vramfit.files.protection import stand
from vramfit.launch.interrupts import note_interrupts
from vramfit.launch.job import job_file, tell
from vramfit.launch.running import leave_after
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.device_opening import opened
from vramfit.planner.planner_job import Answer, PlannerJob
from vramfit.planner.planner_questions import QuestionContext, question_of, question_type
from vramfit.planner.resident_child import DONE, LOOK, OVER, READY
from vramfit.planner.search_evidence import Evidence
from vramfit.planner.workload_check import failure_of_task
from vramfit.torch_internals.pytree import LOGGER as pytree_logger
from vramfit.workload import Workload

_INTERRUPTED = 130
_REAL = ("cpu", "card")
"""Devices on which a workload really runs."""

_TALKATIVE = ("torchao", pytree_logger)
"""Loggers of libraries that warn when torchao is imported, of compiled extensions and of its own enumerations."""


def main(name: str) -> int:
    """Do the job of a folder; 0 where results or what went wrong were written."""
    folder, parent = Path(name), os.getppid()
    note_interrupts(folder)
    job = PlannerJob.read(job_file(folder))

    def progress(text: str) -> None:
        if os.getppid() != parent:
            raise SystemExit("the process that asked for a plan has gone")
        tell(folder, text)

    for talkative in _TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.ERROR)
    try:
        _work(job, folder, progress)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        failure_of_task(error, job.target or " ".join(job.program)).write(folder)
    return 0


def _work(job: PlannerJob, folder: Path, progress: Callable[[str], None]) -> None:
    """Answer the question of a job, or those of the jobs below its folder."""
    kind = question_type(job.question) if job.question else None  # imported before files are protected
    memory, evidence = job.memory, None
    if memory.device not in _REAL:
        if memory.gpu is not None:
            ask_early(None, memory.gpu)
        _protect_files(folder)
    # Asked before the virtual card is there. Wakes no card up.
    card_here = memory.device == "cuda" and torch.cuda.is_available()
    if kind is not None and kind.keeps_searches and memory.device == "cuda" and not job.program:
        evidence = Evidence(job, folder)
        evidence.watch()
    device: DeviceBackend
    workload: Workload
    if job.program:
        from vramfit.planner.scripts.script_opening import opened_program

        trained = kind is None or kind.needs_training
        device, workload = opened_program(memory, job.program, job.run, progress, trained=trained)
    else:
        device, load = opened(memory)
        workload = load(job.target)
    asked = QuestionContext(
        workload=workload,
        device=device,
        memory=memory,
        progress=progress,
        target=job.target,
        evidence=evidence,
        asked_at=job.asked_at,
    )
    if kind is None:
        _stay(folder, asked)
    else:
        job.answer(Answer(found=question_of(job, asked).answer(asked), card_here=card_here))


def _stay(folder: Path, asked: QuestionContext) -> None:
    """Answer questions until the parent says that no more will come."""
    for number in itertools.count():
        place = folder / str(number)
        while not (place / READY).exists():
            if (folder / OVER).exists():
                return
            if not folder.exists() or os.getppid() == 1:
                return
            time.sleep(LOOK)
        job = PlannerJob.read(job_file(place))
        try:
            now = replace(asked, asked_at=job.asked_at)
            job.answer(Answer(found=question_of(job, now).answer(now), card_here=False))
        except Exception as error:
            failure_of_task(error, job.target).write(place)
        (place / DONE).touch()


def _protect_files(folder: Path) -> None:
    """Keep what the workload's code writes on a virtual card from the user's files; see docs/files.md."""
    policy = make_policy(Writes.DISCARD, workplace=folder)
    stand(protect(policy, in_child=True))


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
