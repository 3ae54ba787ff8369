"""The child interpreter that records: becomes ``python script.py`` (or ``python -m module``) with a recorder beside it.

Started by record_run.py as ``python -P -m vramfit.record.record_child JOB``. The exit code is the program's own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import UsageError, VramfitError
from vramfit.launch.child_hooks import HookedProgram, install_hooks, with_hooks
from vramfit.launch.host_meter import HostMemoryMeter
from vramfit.launch.interrupts import leave_at_interrupt, note_interrupts
from vramfit.launch.job import Stage
from vramfit.launch.line_ends import LineEnds
from vramfit.launch.program_job import PARTIAL, ProgramJob
from vramfit.launch.running import OTHER_PROCESSES, leave_after, run_to_end, watch_processes
from vramfit.launch.stopping import Stopping
from vramfit.options.readers import AUTO, CPU
from vramfit.patching import PatchStack
from vramfit.record.record_run import MAX_ENTRIES
from vramfit.trace import Run, RunWarning
from vramfit.watching.process_reporter import report_as_asked

if TYPE_CHECKING:
    from vramfit.record.recorder import Recorder

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def main(job_file: str) -> int:
    """Run the job and return the program's exit code."""
    job = ProgramJob.read(job_file)
    leave_no_longer = leave_at_interrupt()
    note_interrupts(Path(job.folder))
    job.enter(Stage.IMPORTING)
    try:
        recorder = _recorder(job)
        recorder.start()
    except VramfitError as unfit:
        job.fail(unfit)
        return unfit.exit_code
    leave_no_longer()
    job.enter(Stage.RUNNING)
    stopping = Stopping(Path(job.folder), job.options.limits)
    host: HostMemoryMeter | None = None
    if job.options.host_memory:
        host = HostMemoryMeter(recorder.pinned_bytes)
        stopping.on_step = host.step
        host.start()
    started = 0

    def count_processes() -> None:
        nonlocal started
        started += 1

    def save(code: int, run: Run | None = None) -> None:
        steps.close()
        if kept is not None:
            kept.note()
        run = recorder.run() if run is None else run
        if started:
            warning, text = OTHER_PROCESSES
            told = RunWarning(code=warning, message=text, location=None, count=started)
            run = replace(run, warnings=(*run.warnings, told))
        if host is not None:
            run = replace(run, host=host.stop())
        job.save(with_hooks(stopping.told(run), observer, left), exit_code=code)
        job.enter(Stage.DONE)
        if job.ends_line:
            line_ends.end()

    def finish(code: int, error: BaseException | None) -> None:
        if kept is not None:
            kept.end(error)
        save(code, recorder.stop(error))

    with PatchStack() as patches:
        line_ends = LineEnds(patches)
        watch_processes(count_processes, patches)
        steps = recorder.count_steps(stopping, patches)
        kept = recorder.watch_kept(patches)
        observer = recorder.observe(patches)
        left = install_hooks(job.hooks, HookedProgram(observer=observer, patches=patches, refuse=job.refuse))
        stopping.install(save, patches)
        report_as_asked(recorder.watched_figures())
        return run_to_end(job.command, finish, patches, stopping)


def _recorder(job: ProgramJob) -> Recorder:
    """The recorder that the job asks for.

    Raises:
        UsageError: this machine does not have that card.
    """
    options = job.options
    device = options.device or AUTO
    if device == CPU:
        from vramfit.record.cpu_recorder import CpuRecorder

        return CpuRecorder(budget=options.budget, alloc_conf=options.alloc_conf, journal=job.journal_file)
    _need_card(device)
    from vramfit.record.card_recorder import CardRecorder

    return CardRecorder(
        device="cuda" if device == AUTO else device,
        budget=options.budget,
        max_entries=MAX_ENTRIES,
        partial=os.path.join(job.folder, PARTIAL),
    )


def _need_card(device: str) -> None:
    """Check for a card without initialising it: the program may still choose among several."""
    import torch

    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"  # asks the driver's management library, which sets nothing up
    try:
        there = torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before
    if not there:
        raise UsageError(
            "no card is given, and torch finds none on this machine"
            if device == AUTO
            else f"there is no {device} on this machine: torch finds no card",
            'Choose a virtual one with --gpu, such as --gpu "RTX 4090" (vramfit gpus lists them), or meter the '
            "program on the CPU: --device cpu --budget 2GiB",
        )


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
