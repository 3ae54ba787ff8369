"""Asks an installed cuDNN, in a process of its own, what torch's operations take on a card; never waits for ever."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramfit.cudnn.answering import ATTENTION, Opening, Reply
from vramfit.cudnn.found_frontend import WANTS_DRIVER, FrontendInstallation, find_frontend
from vramfit.cudnn.found_library import CudnnInstallation, dotted, find_cudnn
from vramfit.cudnn.questions import AttentionQuestion, ConvAnswer, ConvQuestion, device_properties
from vramfit.cudnn.stand_in import stand_in
from vramfit.errors import UsageError, VramfitError
from vramfit.files.policy import cache_folder
from vramfit.gpus import GpuSpec
from vramfit.launch.starting import python_command, start
from vramfit.options.cudnn_choice import wanted_cudnn
from vramfit.plain import from_plain, to_plain

_FIRST = 120.0
"""Seconds within which the process has to be there and have loaded the library: a second or two, unless the machine is
busy."""

_NEXT = 30.0
"""Seconds for a question; most take a millisecond."""

_ENDING = 5.0
"""Seconds within which a process whose pipes are closed has ended."""

_MOST_ATTENTIONS = 64
"""Different questions about attention that a run asks, each of which has its kernels compiled and takes up to two
seconds: a program that generates text has another length of keys at every step."""

_OTHER_CLOCKS = (0.85, 1.15)
"""Shares of the boost clock between which cards of one name lie: vendors set their own, and power limits lower them."""


class CudnnAsker:
    """A process that knows one card and answers questions about it, until it fails.

    Args:
        installation: the library.
        spec: the card.

    Attributes:
        version: of the library, in its own numbering.
        failure: why nothing can be asked any more; empty while it can.
        lacks: why attention cannot be asked about; empty while it can.
        asked: questions that the process has answered.
        seconds: that this took.

    Raises:
        UsageError: the library cannot be used here; the message says why.
    """

    def __init__(self, installation: CudnnInstallation, spec: GpuSpec) -> None:
        self.failure = ""
        self._spec = spec
        self._lock = threading.Lock()
        self._answers: dict[ConvQuestion | AttentionQuestion, Reply] = {}
        self._buffer = b""
        self._pid = os.getpid()
        self.asked = 0
        self.seconds = 0.0
        cache = cudnn_cache()
        folders = list(installation.needs)
        frontend = find_frontend(installation)
        if (driver := stand_in(Path(installation.library), cache)) is not None:
            folders.append(driver)
            # It lets the library be loaded, and is none with which attention's plans are to be made.
            frontend = FrontendInstallation(lacks=frontend.lacks or WANTS_DRIVER)
        self._process: subprocess.Popen[bytes] | None = start(
            python_command("vramfit.cudnn.answering"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(folders),
            start_new_session=True,  # an interrupt of the program is none of this process
        )
        self.lacks = frontend.lacks
        opening = Opening(
            library=installation.library,
            version=installation.version,
            card=device_properties(spec),
            others=tuple(device_properties(spec, clock_share=share) for share in _OTHER_CLOCKS),
            cache=str(cache),
            frontend=frontend.module,
        )
        try:
            self._send(json.dumps(to_plain(opening)))
            first = self._receive(_FIRST)
            if first.fatal:
                raise UsageError(
                    f"cuDNN cannot be asked: {first.refusal}", "Leave --cudnn out, or install another"
                )
        except BaseException:
            self.close()
            raise
        self.version = first.version

    def __repr__(self) -> str:
        return f"<CudnnAsker {dotted(self.version)} for {self._spec.name}>"

    @property
    def pid(self) -> int | None:
        """Of the process; None where it has ended."""
        return None if self._process is None else self._process.pid

    def plans(self, question: ConvQuestion) -> ConvAnswer | None:
        """The plans for a convolution; None where cuDNN cannot say."""
        reply = self._reply(question, to_plain(question))
        return None if reply is None else reply.answer

    def attention(self, question: AttentionQuestion) -> int | None:
        """Workspace in bytes of the plan for attention; None where cuDNN cannot say."""
        if self.lacks:
            return None
        reply = self._reply(question, {ATTENTION: to_plain(question)})
        if reply is None:
            return None
        self.lacks = reply.lacks
        return reply.workspace

    def _reply(self, question: ConvQuestion | AttentionQuestion, line: Any) -> Reply | None:
        """What the process says, or has said; None where it says nothing any more."""
        with self._lock:
            if question not in self._answers and self._process is not None and os.getpid() == self._pid:
                started = time.perf_counter()
                try:
                    self._send(json.dumps(line, separators=(",", ":")))
                    reply = self._receive(_NEXT if self.asked else _FIRST)
                    if reply.fatal:
                        raise VramfitError(f"cuDNN cannot be asked: {reply.refusal}")
                except VramfitError as error:
                    self.close()
                    self.failure = error.message
                    return None
                self.asked += 1
                self.seconds += time.perf_counter() - started
                self._answers[question] = reply
            return self._answers.get(question)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._pid:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # it is gone already
                    stream.close()
        process.kill()
        process.wait()

    # -- lines ---------------------------------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise VramfitError(self._end()) from None

    def _receive(self, seconds: float) -> Reply:
        """The next line.

        Raises:
            VramfitError: the process ended, or is silent.
        """
        assert self._process is not None and self._process.stdout is not None
        handle, limit = self._process.stdout.fileno(), time.monotonic() + seconds
        waiting = select.poll()  # a program may have more files open than `select.select` takes
        waiting.register(handle, select.POLLIN)
        while b"\n" not in self._buffer:
            if not waiting.poll(max(0, round(1000 * (limit - time.monotonic())))):
                raise VramfitError(f"cuDNN did not answer within {seconds:.0f} s")
            more = os.read(handle, 1 << 16)
            if not more:
                raise VramfitError(self._end())
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return from_plain(json.loads(line), Reply)
        except ValueError as error:  # msgspec's errors are among them
            raise VramfitError(f"the process that asks cuDNN gave no answer: {error}") from None

    def _end(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return "the process that asks cuDNN does not speak any more"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process that asks cuDNN ended {how}"


class AskedCudnn:
    """What one run asks of cuDNN.

    Args:
        asker: the process, which runs share.
        tell: called with a line of words when it fails.

    Attributes:
        attention_lacks: why attention of the run was left to the rules; empty where it was not.
    """

    def __init__(self, asker: CudnnAsker, tell: Callable[[str], object]) -> None:
        self._asker = asker
        self._tell = tell
        self._told = False
        self._questions: set[ConvQuestion] = set()
        self._attentions: dict[AttentionQuestion, int | None] = {}
        self.attention_lacks = ""

    @property
    def version(self) -> int:
        """Of the library, in its own numbering."""
        return self._asker.version

    @property
    def convolutions(self) -> int:
        """How many different ones it answered."""
        return len(self._questions)

    @property
    def attentions(self) -> int:
        """How many different passes of attention it answered."""
        return sum(workspace is not None for workspace in self._attentions.values())

    def plans(self, question: ConvQuestion) -> ConvAnswer | None:
        """The plans for a convolution; None where cuDNN cannot say."""
        answer = self._asker.plans(question)
        if answer is not None:
            self._questions.add(question.with_most(1))
        else:
            self._tell_failure()
        return answer

    def attention(self, question: AttentionQuestion) -> int | None:
        """Workspace in bytes of the plan for attention; None where cuDNN cannot say."""
        if question in self._attentions:
            return self._attentions[question]
        if len(self._attentions) == _MOST_ATTENTIONS:
            self.attention_lacks = f"beyond {_MOST_ATTENTIONS} different ones"
            return None
        workspace = self._attentions[question] = self._asker.attention(question)
        if workspace is None:
            self._tell_failure()
            self.attention_lacks = self._asker.lacks or "cuDNN had no plan for some"
        return workspace

    def _tell_failure(self) -> None:
        """Say once that nothing can be asked any more."""
        if self._asker.failure and not self._told:
            self._told = True
            self._tell(self._asker.failure)


_started: dict[str, CudnnAsker | VramfitError] = {}
"""By what was chosen and the card: each takes half a second to start, serves all runs, and ends with this process."""


def ask_cudnn(chosen: str, spec: GpuSpec) -> CudnnAsker:
    """The process that asks cuDNN about a card; it is started where there is none yet.

    Args:
        chosen: see `find_cudnn`.
        spec: the card.

    Raises:
        VramfitError: that is not possible; the message says why in a line.
    """
    key = json.dumps([chosen, os.getpid(), device_properties(spec)])
    found = _started.get(key)
    if found is None:
        try:
            found = CudnnAsker(find_cudnn(chosen), spec)
            atexit.register(found.close)
        except VramfitError as error:
            found = error
        except OSError as error:  # such as a cache that cannot be written
            found = VramfitError(f"cuDNN cannot be asked: {error}")
        _started[key] = found
    if isinstance(found, VramfitError):
        raise found
    return found


def ask_early(chosen: str | None, spec: GpuSpec) -> None:
    """Start the process before files are protected: what it keeps for later runs is to be written for real.

    Where it cannot be started, the virtual GPU says so.

    Args:
        chosen: see `wanted_cudnn`.
        spec: the card.
    """
    with contextlib.suppress(VramfitError):
        if (wanted := wanted_cudnn(chosen)) is not None:
            ask_cudnn(wanted, spec)


def cudnn_cache() -> Path:
    """Where answers are kept: ``cudnn`` in ``VRAMFIT_CACHE_DIR`` or in ``vramfit`` of the user's caches."""
    chosen = os.environ.get("VRAMFIT_CACHE_DIR")
    if chosen:
        return Path(chosen) / "cudnn"
    return Path(cache_folder(os.environ)) / "vramfit" / "cudnn"


def _environment(folders: list[str]) -> dict[str, str]:
    """Of the process: it finds its libraries, and sees no card."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONSTARTUP")
    }
    before = environ.get("LD_LIBRARY_PATH")
    environ["LD_LIBRARY_PATH"] = ":".join([*folders, *([before] if before else [])])
    environ["CUDA_VISIBLE_DEVICES"] = ""
    return environ
