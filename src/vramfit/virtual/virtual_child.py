"""The child interpreter: becomes ``python script.py`` (or ``python -m module``) on a virtual GPU.

Started by virtual_run.py as ``python -P -m vramfit.virtual.virtual_child JOB``, where JOB is a JSON file that says what
to run and where to leave the results. The exit code is the program's own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from vramfit.cudnn.asker import ask_early
from vramfit.errors import VramfitError
from vramfit.files import protect
from vramfit.files.protection import stand
from vramfit.launch.child_hooks import HookedProgram, install_hooks, with_hooks
from vramfit.launch.host_meter import HostMemoryMeter
from vramfit.launch.interrupts import leave_at_interrupt, note_interrupts
from vramfit.launch.job import Stage
from vramfit.launch.line_ends import LineEnds
from vramfit.launch.offline import refuse_connections
from vramfit.launch.running import OTHER_PROCESSES, leave_after, run_to_end, watch_processes
from vramfit.launch.stopping import Stopping
from vramfit.options.cudnn_choice import NONE
from vramfit.patching import PatchStack
from vramfit.virtual.virtual_run import VirtualJob
from vramfit.watching.process_reporter import report_as_asked


def main(job_file: str) -> int:
    """Run the job; returns the program's exit code."""
    job = VirtualJob.read(job_file)
    leave_no_longer = leave_at_interrupt()
    note_interrupts(Path(job.folder))
    job.enter(Stage.IMPORTING)
    ask_early(job.options.cudnn or NONE, job.options.card)
    try:
        # Before torch is imported: a namespace wants a single thread. Never left: the process ends in it.
        protection = stand(protect(job.files, in_child=True))
    except VramfitError as unfit:
        job.fail(unfit)
        return unfit.exit_code
    from vramfit.capture.kept_memory import watch_kept
    from vramfit.capture.meter_figures import MeterFigures
    from vramfit.capture.observing.program_observer import observe_program
    from vramfit.capture.step_counter import count_steps
    from vramfit.virtual.gpu import VirtualGPU
    from vramfit.virtual.lazy_dynamo import forget_dynamo
    from vramfit.virtual.ranks.one_process import alone

    job.enter(Stage.CHECKING)
    try:
        command = alone(job.command, job.options.gpus) if job.place is None else job.command
        gpu = VirtualGPU(
            job.options, journal=job.journal_file, **({} if job.place is None else job.place.arguments())
        )
        gpu.mode.machine.limit, gpu.mode.machine.begins_at = job.limit, job.begins_at
        gpu.__enter__()
    except VramfitError as unfit:
        job.fail(unfit)
        return unfit.exit_code
    if job.offline:
        refuse_connections()
    leave_no_longer()
    job.enter(Stage.RUNNING)
    stopping = Stopping(Path(job.folder), job.options.limits)
    host: HostMemoryMeter | None = None
    if job.options.host_memory:
        host = HostMemoryMeter(lambda: gpu.mode.machine.pinned.reserved_bytes)
        stopping.on_step = host.step
        host.start()

    def save(code: int) -> None:
        steps.close()
        kept.note()
        seen = None if host is None else host.stop()
        run = replace(stopping.told(gpu.run), files=protection.changes(), host=seen)
        job.save(with_hooks(run, observer, left), exit_code=code)
        job.enter(Stage.DONE)
        if job.ends_line:
            line_ends.end()

    def finish(code: int, error: BaseException | None) -> None:
        kept.end(error)
        gpu.__exit__(type(error) if error else None, error, None)
        save(code)

    location = gpu.mode.guesses.location
    with PatchStack() as patches:
        line_ends = LineEnds(patches)
        watch_processes(lambda: gpu.mode.machine.warn(*OTHER_PROCESSES, location=location()), patches)
        steps = count_steps(gpu.meter, stopping, patches)
        kept = watch_kept(gpu.meter, patches)
        observer = observe_program(gpu.meter.modules, gpu.meter.phases, patches)
        left = install_hooks(
            job.hooks, HookedProgram(observer=observer, patches=patches, gpu=gpu, refuse=job.refuse)
        )
        stopping.install(save, patches)
        report_as_asked(MeterFigures(gpu.meter, "virtual"))
        forget_dynamo(patches)
        return run_to_end(command, finish, patches, stopping)


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
