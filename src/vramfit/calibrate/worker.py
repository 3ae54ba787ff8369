"""A child process that measures or predicts, and its parent's side: a command a line and a reply a line, both JSON.

`Child` starts it as ``python -P -m vramfit.calibrate.worker CONFIG``. An op that destroys the CUDA context takes that
process with it, and nothing else. The parent needs no torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TextIO

from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import GpuSpec
from vramfit.launch.job import Failure
from vramfit.launch.starting import python_command, start
from vramfit.plain import from_plain, to_plain
from vramfit.torch_internals.releases import refuse_older

if TYPE_CHECKING:
    from vramfit.calibrate.measure import CaseMeter

_START_SECONDS = 300.0
_FRESH_AFTER = 25  # cases on one virtual GPU, whose trace grows with each


class Role(Enum):
    """What a worker stands for."""

    CARD = "card"
    VIRTUAL_CARD = "virtual card"
    """The virtual GPU in the card's place: measured by the same code."""
    PREDICTOR = "predictor"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """How a worker is started.

    Attributes:
        device: index of the card.
        gpu: the virtual GPU; None for a card.
        memory_bytes: most that it may allocate, None without a limit.
        profile: the profile of a virtual card, ``none`` without one.
    """

    role: Role
    device: int = 0
    gpu: GpuSpec | None = None
    memory_bytes: int | None = None
    profile: str = "none"


# -- the parent's side -------------------------------------------------------------------------------------------


class CommandFailed(Exception):
    """A worker could not carry out a command, or died of it.

    Attributes:
        kind: ``memory``, ``error``, ``broken``, ``died`` or ``time``.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    """A worker process, started anew when a command ended it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._errors: Any = None
        self.starts = 0

    def start(self) -> None:
        """Start the worker if it does not run.

        Raises:
            UsageError: the worker cannot work here, or ends before it says anything.
        """
        if self._process is not None and self._process.poll() is None:
            return
        refuse_older()
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
        threading.Thread(target=_read_replies, args=(self._process, self._replies), daemon=True).start()
        try:
            first = self._receive(_START_SECONDS)
        except CommandFailed as error:
            raise UsageError(f"a worker could not start: {error}", "Check that torch works here") from None
        if "unfit" in first:
            raise from_plain(first["unfit"], Failure).error()

    def limit(self, nbytes: int, timeout: float) -> None:
        """Let the worker allocate no more than so many bytes, now and whenever it is started anew."""
        self._config = replace(self._config, memory_bytes=nbytes)
        self.ask("limit", timeout, nbytes=nbytes)

    def ask(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Send a command and wait for what it found.

        Raises:
            CommandFailed: the command failed, took too long, or ended the process.
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
        """End the process; the next command starts another one."""
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


def _read_replies(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by `stop`
        for line in process.stdout:
            replies.put(line)
    replies.put(None)


# -- the child -----------------------------------------------------------------------------------------------------


def main(text: str) -> None:
    """Answer the commands on standard input until they end."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what torch or a library prints is no reply
    config = from_plain(json.loads(text), WorkerConfig)
    try:
        server = _server(config)
    except VramfitError as error:
        _reply(replies, {"unfit": to_plain(Failure.of(error))})
        return
    _reply(replies, {"ready": True})
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        command = json.loads(line)
        found, fine = server.answer(command)
        _reply(replies, found)
        if not fine:
            break
    server.close()


def _reply(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


class _Server:
    """Answers commands on the device of this process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.meter: CaseMeter | None = None

    def answer(self, command: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The reply to a command, and whether this process can go on."""
        import torch

        try:
            found = getattr(self, f"do_{command.pop('do')}")(**command)
            return {"found": found}, True
        except torch.OutOfMemoryError as error:
            return {"failed": "memory", "text": _first_line(error)}, True
        except Exception as error:
            text = f"{type(error).__name__}: {_first_line(error)}"
            broken = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
            return {"failed": "broken" if broken else "error", "text": text}, not broken

    def close(self) -> None:
        """Give back what the server holds: nothing, here."""

    def prepare(self) -> None:
        """Be ready for one more case."""

    def do_about(self) -> dict[str, Any]:
        """What the card and the software are."""
        import torch

        card: Any = torch.cuda.get_device_properties(self.config.device)
        return {
            "name": card.name,
            "total_bytes": card.total_memory,
            "capability": [card.major, card.minor],
            "sm_count": card.multi_processor_count,
            "l2_bytes": card.L2_cache_size,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "cudnn": int(torch.backends.cudnn.version() or 0),
        }

    def do_memory(self) -> dict[str, int]:
        """Free and total bytes of the card."""
        import torch

        free, total = torch.cuda.mem_get_info(self.config.device)
        return {"free": free, "total": total}

    def do_context(self) -> dict[str, Any]:
        """See `surroundings.make_context`."""
        from vramfit.calibrate.surroundings import make_context

        return asdict(make_context(self.config.device))

    def do_limit(self, nbytes: int) -> None:
        """Allocate no more than so many bytes."""
        import torch

        total = torch.cuda.get_device_properties(self.config.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.config.device)
        self.config = replace(self.config, memory_bytes=nbytes)

    def do_first_uses(self) -> list[dict[str, Any]]:
        """See `surroundings.first_uses`."""
        from vramfit.calibrate.surroundings import first_uses

        return [asdict(growth) for growth in first_uses(self.config.device)]

    def do_rates(self) -> dict[str, Any]:
        """See `surroundings.rates`."""
        from vramfit.calibrate.surroundings import rates

        return asdict(rates(self.config.device))

    def do_case(self, name: str, timed: bool = True) -> dict[str, Any]:
        """Measure a case."""
        import torch

        from vramfit.calibrate.cases import find_case
        from vramfit.calibrate.measure import CaseMeter
        from vramfit.calibrate.records import record_to_plain

        self.prepare()
        gc.collect()
        torch.cuda.empty_cache()
        if self.meter is None:
            self.meter = CaseMeter(self.config.device)
        return record_to_plain(self.meter.measure(find_case(name), timed=timed))


class _CardServer(_Server):
    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        import torch

        if not torch.cuda.is_available():
            raise UsageError(
                "PyTorch sees no CUDA card on this machine, so there is nothing to measure",
                "Run it where the card is; --gpu NAME lets the virtual GPU take its place, to try the command",
            )
        count = torch.cuda.device_count()
        if config.device >= count:
            raise UsageError(
                f"there is no card {config.device}; PyTorch sees {count}", "Choose another --device"
            )
        torch.cuda.set_device(config.device)
        if config.memory_bytes is not None:
            self.do_limit(config.memory_bytes)


class _VirtualServer(_Server):
    """The virtual GPU as the card; a new one now and then, since its trace grows."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._cases = 0
        self._enter()

    def _make(self) -> Any:
        from vramfit.virtual.gpu import VirtualGPU

        assert self.config.gpu is not None
        return VirtualGPU(  # no program of a user's runs here
            self.config.gpu, alloc_conf="", profile=self.config.profile, writes="real"
        )

    def _enter(self) -> None:
        self.gpu, self.meter = self._make(), None
        self.gpu.__enter__()
        if self.config.memory_bytes is not None:
            self.do_limit(self.config.memory_bytes)

    def prepare(self) -> None:
        """Change to a new virtual GPU when the old one's trace has grown long."""
        self._cases += 1
        if self._cases % _FRESH_AFTER == 0:
            self.gpu.__exit__(None, None, None)
            self._enter()

    def close(self) -> None:
        """Leave the virtual GPU."""
        with contextlib.suppress(Exception):
            self.gpu.__exit__(None, None, None)


class _PredictingServer(_VirtualServer):
    def _make(self) -> Any:
        from vramfit.calibrate.predict import PredictingGPU

        assert self.config.gpu is not None
        return PredictingGPU(self.config.gpu, alloc_conf="", profile="none")

    def do_case(self, name: str, timed: bool = True) -> dict[str, Any]:
        """Predict a case."""
        from vramfit.calibrate.cases import find_case
        from vramfit.calibrate.records import record_to_plain

        del timed
        self.prepare()
        gc.collect()
        return record_to_plain(self.gpu.predict(find_case(name)))


def _server(config: WorkerConfig) -> _Server:
    kinds = {
        Role.CARD: _CardServer,
        Role.VIRTUAL_CARD: _VirtualServer,
        Role.PREDICTOR: _PredictingServer,
    }
    return kinds[config.role](config)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # autograd's threads outlive the interpreter and could abort a finished process
