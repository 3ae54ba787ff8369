"""The child interpreter: becomes ``python script.py`` (or ``python -m module``) on a virtual GPU.

Started by runner.py as ``python -P -m vramfit.virtual.child JOB``, where JOB is a JSON file that says what to run and
where to leave the results. The exit code is the program's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.programs import processes
from vramfit.programs.interrupts import note_interrupts
from vramfit.programs.job import Stage
from vramfit.programs.patching import PatchStack
from vramfit.programs.processes import CODE, MESSAGE
from vramfit.programs.running import leave_after, run_to_end
from vramfit.virtual.job import VirtualJob, spec_from_plain


def main(job_file: str) -> int:
    """Run the job; returns the program's exit code."""
    job = VirtualJob.read(job_file)
    note_interrupts(Path(job.folder))
    job.enter(Stage.IMPORTING)
    from vramfit.virtual.gpu import VirtualGPU

    job.enter(Stage.CHECKING)
    try:
        gpu = VirtualGPU(
            spec_from_plain(job.gpu),
            gpus=job.gpus,
            alloc_conf=job.alloc_conf,
            assume=job.assume,
            profile=job.profile,
            journal=job.journal_file,
        )
        gpu.__enter__()
    except VramfitError as unfit:
        job.fail(unfit)
        return unfit.exit_code
    job.enter(Stage.RUNNING)

    def finish(code: int, error: BaseException | None) -> None:
        gpu.__exit__(type(error) if error else None, error, None)
        job.save(gpu.run, exit_code=code)
        job.enter(Stage.DONE)

    location = gpu.mode.guesses.location
    with PatchStack() as patches:
        processes.install(lambda: gpu.mode.machine.warn(CODE, MESSAGE, location=location()), patches)
        return run_to_end(job.command, finish, patches)


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
