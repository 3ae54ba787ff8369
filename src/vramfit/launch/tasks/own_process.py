"""Calls a function in a process of its own, which is ended when it takes too long: a callable for any executor.

The call itself is a value that can be pickled. Whoever makes it, a thread of this process, a worker of another one or a
machine far away, starts the child beside itself, waits for it, and returns what came of it. No torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle

from vramfit.launch.interrupts import INTERRUPTED, Signals, passed_on, run_child
from vramfit.launch.runner import kill_with_children
from vramfit.launch.starting import own_options, python_command
from vramfit.launch.tasks.task import LINE, Ending, Task, TaskResult

CALL, ANSWER, OUTPUT = "call.pickle", "answer.pickle", "output"
"""Files of the child's folder: what it calls, what came of it, and what it printed."""

CHILD = "vramfit.launch.tasks.task_child"

_GRACE = 10.0
"""Seconds that a process has for its end once it was interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProcess:
    """A task's call in a process of its own.

    Attributes:
        key: the task's.
        packed: where the child finds modules, the key and the call itself, by cloudpickle.
        seconds: after which it is ended; None for no limit.
        environ: variables added to those of the process that starts it.
        log: a file to which is added what it prints; None keeps no more than its last line, for a failure.
    """

    key: str
    packed: bytes
    seconds: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    log: str | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        *,
        seconds: float | None = None,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> OwnProcess:
        """The call of a task.

        Raises:
            pickle.PicklingError, TypeError: its function or arguments cannot be passed on.
        """
        path = [os.path.abspath(entry) for entry in sys.path]
        call = cloudpickle.dumps((task.function, task.arguments))
        return cls(
            key=task.key,
            packed=cloudpickle.dumps((path, task.key, call)),
            seconds=seconds,
            environ=dict(environ or {}),
            log=None if log is None else os.path.abspath(log),
        )

    def __call__(self) -> TaskResult:
        """Start the process and wait for its end.

        Raises:
            UsageError: it cannot be started.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vramfit-task-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / CALL).write_bytes(self.packed)
            output = folder / OUTPUT if self.log is None else Path(self.log)
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("ab") as file, passed_on(folder) as signals:
                printed = file.tell()
                limit = _Limit(self.seconds, signals)
                code = run_child(
                    python_command(CHILD, name, options=own_options()),
                    signals,
                    watch=limit.watch,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.environ},
                )
            seconds = time.monotonic() - began
            return self._result(folder, code, limit, seconds, output, printed)

    def _result(
        self, folder: Path, code: int, limit: _Limit, seconds: float, output: Path, printed: int
    ) -> TaskResult:
        """What a child that has ended leaves."""
        answer = folder / ANSWER
        if answer.exists():
            found: TaskResult = cloudpickle.loads(answer.read_bytes())
            return found
        if limit.late:
            why = f"took more than {self.seconds:g} s"
            return TaskResult(key=self.key, ending=Ending.LATE, failure=why, seconds=seconds)
        if limit.stopped or code in (INTERRUPTED, -signal.SIGINT):
            return TaskResult(key=self.key, ending=Ending.STOPPED, failure="interrupted", seconds=seconds)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        last = _last_line(output, printed)
        why = f"its process {how}{f': {last}' if last else ''}"
        return TaskResult(key=self.key, ending=Ending.DIED, failure=why[:LINE], seconds=seconds)


class _Limit:
    """Ends a child that takes too long, or does not end once it was interrupted.

    Attributes:
        late: whether it took too long.
        stopped: whether it was interrupted.
    """

    def __init__(self, seconds: float | None, signals: Signals) -> None:
        self.late = False
        self._until = None if seconds is None else time.monotonic() + seconds
        self._signals = signals
        self._kill_at: float | None = None

    @property
    def stopped(self) -> bool:
        return self._signals.interrupted or self._signals.terminated is not None

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Look at the child, some times a second."""
        now = time.monotonic()
        if self.stopped and self._kill_at is None:
            self._kill_at = now + _GRACE
        if self._until is not None and now >= self._until:
            self.late = not self.stopped
            kill_with_children(child)
        elif self._kill_at is not None and now >= self._kill_at:
            kill_with_children(child)


def _last_line(output: Path, since: int) -> str:
    with output.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
