"""The parent's side of a worker: commands with a time limit, and what is known of one that died. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from dataclasses import replace
from typing import Any

from vramfit.calibrate.worker import WorkerConfig
from vramfit.errors import UsageError, VramfitError
from vramfit.launch.job import Failure
from vramfit.launch.starting import python_command, start
from vramfit.plain import from_plain, to_plain

_START_SECONDS = 300.0


class CommandFailed(Exception):
    """A worker could not do what it was told, or died of it.

    Attributes:
        kind: ``memory``, ``error``, ``broken``, ``died`` or ``time``.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    """A worker process, started anew when a command ended it.

    Args:
        config: what it is.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._errors: Any = None
        self.starts = 0

    def start(self) -> None:
        """Start it if it does not run.

        Raises:
            UsageError: it says that it cannot work here, or ends before it says anything.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.starts += 1
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  it lives as long as the child
        command = python_command("vramfit.calibrate.worker", json.dumps(to_plain(self._config)))
        self._process = start(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        self._replies = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._replies), daemon=True).start()
        try:
            first = self._receive(_START_SECONDS)
        except CommandFailed as error:
            raise UsageError(f"a worker could not start: {error}", "Check that torch works here") from None
        if "unfit" in first:
            raise from_plain(first["unfit"], Failure).error()

    def limit(self, nbytes: int, timeout: float) -> None:
        """Let it allocate no more than so many bytes, now and whenever it is started anew."""
        self._config = replace(self._config, memory_bytes=nbytes)
        self.ask("limit", timeout, nbytes=nbytes)

    def ask(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Send a command and wait for what it found.

        Raises:
            CommandFailed: it failed, took too long, or ended the process.
            UsageError: the worker could not be started.
        """
        self.send(do, **arguments)
        return self.receive(timeout)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command; `receive` gives its reply."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says how it died
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Any:
        """What the last command found; see `ask`."""
        reply = self._receive(timeout)
        if "failed" in reply:
            if reply["failed"] == "broken":
                self.stop()
            raise CommandFailed(reply["failed"], reply["text"])
        return reply["found"]

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.stop()
            raise CommandFailed("time", f"took longer than {timeout:.0f} s") from None
        if line is None:
            text = self._how_it_died()
            self.stop()
            raise CommandFailed("died", text)
        found: dict[str, Any] = json.loads(line)
        return found

    def _how_it_died(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"the process ended {how}" + (f": {lines[-1][:300]}" if lines else "")

    def stop(self) -> None:
        """End it; the next command starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _read(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by `stop`
        for line in process.stdout:
            replies.put(line)
    replies.put(None)


def as_usage_error(error: CommandFailed, doing: str) -> VramfitError:
    """A failure without which nothing else makes sense, for the user."""
    return VramfitError(f"{doing} failed: {error}", "Run the command again; what was measured is kept")
