"""A child of the planner that stays for several questions about one workload: an interpreter starts once.

Imports no torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.files import Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.launch.interrupts import Signals, passed_on
from vramfit.launch.job import failure_of, listening, result_of
from vramfit.launch.starting import start
from vramfit.planner.asking import STANDARD_ERROR, child_command, child_environ
from vramfit.planner.planner_job import Answer, DeviceMemory, PlannerJob
from vramfit.planner.planner_questions import Result
from vramfit.torch_internals.releases import refuse_older
from vramfit.workload import split_target

Progress = Callable[[str], object]

READY, DONE, OVER = "ready", "done", "over"
"""Files by which parent and child wait for each other: a job is there, it is answered, no more will come."""

LOOK = 0.02
"""Seconds between two looks for them."""

_PATIENCE = 5.0
"""Seconds that the child has for its end."""


class ResidentChild:
    """The parent's side; see `resident_child`."""

    def __init__(self, folder: Path, child: subprocess.Popen[bytes], signals: Signals) -> None:
        self._folder, self._child, self._signals, self._asked = folder, child, signals, 0

    def ask(self, job: PlannerJob, kind: type[Result]) -> Result:
        """Let the child do a job, and wait for what it found.

        Raises:
            VramfitError: the job failed, or the child died.
            KeyboardInterrupt: it was interrupted.
        """
        folder = self._folder / str(self._asked)
        self._asked += 1
        folder.mkdir()
        replace(job, folder=str(folder)).write()
        (folder / READY).touch()
        while not (folder / DONE).exists():
            if self._child.poll() is not None:
                self._raise_end()
            time.sleep(LOOK)
        if (failure := failure_of(folder)) is not None:
            raise failure.error()
        answer: Answer[Result] | None = result_of(folder, Answer[kind])  # type: ignore[valid-type]
        assert answer is not None
        return answer.found

    def end(self) -> None:
        """Let the child go."""
        (self._folder / OVER).touch()
        try:
            self._child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.terminate()
            self._child.wait()

    def _raise_end(self) -> None:
        if self._signals.interrupted:
            raise KeyboardInterrupt
        if self._signals.terminated is not None:
            raise SystemExit(128 + self._signals.terminated)
        if (failure := failure_of(self._folder)) is not None:
            raise failure.error()
        code = self._child.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise VramfitError(f"the planner's process {how}", "The lines above say why")


@contextmanager
def resident_child(target: str, memory: DeviceMemory, progress: Progress | None) -> Iterator[ResidentChild]:
    """A child that has loaded a workload, and answers questions about it until the block ends.

    Raises:
        UsageError: there is no such file.
    """
    split_target(target)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vramfit-")))
        PlannerJob(folder=str(folder), target=target, memory=memory).write()
        stack.enter_context(attended(make_policy(Writes.DISCARD, workplace=folder)))  # as the child makes it
        signals = stack.enter_context(passed_on(folder))
        stack.enter_context(listening(folder, progress))
        refuse_older()
        output = subprocess.DEVNULL if sys.stderr is None else STANDARD_ERROR  # closed from the start
        signals.starting = True
        child = stack.enter_context(
            start(child_command(folder, memory.device), stdout=output, env=child_environ(memory))
        )
        signals.started(child)
        resident = ResidentChild(folder, child, signals)
        stack.callback(resident.end)
        yield resident
