"""Child interpreters that begin with torch and vramfit imported: importing takes most of what a small run takes.

A process of its own, the nursery, imports them once and computes nothing. Asked for a Python program, it forks, and the
fork becomes what the command line would have started: with its arguments, folder, variables, input and output, as
``__main__`` of its own, and as a child of whoever asked, who waits for it and sends it signals as to any other. Only
the start of the interpreter is not tested that way: some of `tests.virtual.test_runner` and of `launch`, and all tests
of `files`, start theirs cold. Programs that use transformers have a nursery of their own, which has imported that too.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from vramfit.launch import interrupts, starting

CHILDREN = frozenset(
    {
        "vramfit",
        "vramfit.calibrate.worker",
        "vramfit.planner.planner_child",
        "vramfit.record.record_child",
        "vramfit.virtual.virtual_child",
    }
)
"""What vramfit starts itself, or a test in the place of that."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH")
"""Beginnings of variables that interpreters and libraries read when they start: they must be the nursery's."""

_READ_LATER = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_CUBLAS_WORKSPACE_CACHE",  # by vramfit's rules, for there is no card
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # accelerate and Lightning set it when they are imported
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES",  # torchao's compiled kernels: nothing that runs on a CPU
    }
)
"""Variables among these that are read whenever they are needed, in a torch without CUDA."""

_MODULES = (
    "pydantic",  # of the report's schema
    "torch._dynamo",  # every `FakeTensorMode` imports it
    "torch._inductor.decomposition",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
)
"""What nearly every child imports when it begins to work."""

_FRAMEWORK = "transformers"
_FRAMEWORK_MODULES = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.trainer")
"""What programs that use it have imported sooner or later, and what takes seconds."""

_STARTED_WITH: dict[str, str] = {}
"""What this process's interpreter and libraries read when they started."""

_lock = threading.Lock()
_computes_nothing = False
"""Whether this process may fork by itself: it is a fork, and one of ours that leaves computing to its children."""


def program_of(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What the command line of a Python interpreter starts, without options of the interpreter; None for all else."""
    words = [os.fspath(word) for word in arguments]
    if words[0] != sys.executable:
        return None
    safe = words[1:2] == ["-P"]
    words = words[1 + safe :]
    if words[:1] in (["-m"], ["-c"]):
        kind, (_, name, *rest) = {"-m": "module", "-c": "code"}[words[0]], words
    elif words and not words[0].startswith("-"):
        kind, (name, *rest) = "script", words
    else:
        return None
    return {"kind": kind, "name": name, "arguments": rest, "safe": safe}


def _uses_framework(asked: Mapping[str, Any]) -> bool:
    """Whether a program, or a file that it is given, speaks of the framework."""
    words = [str(word) for word in (asked["name"], *asked["arguments"])]
    if asked["kind"] == "module":
        words.append(f"{asked['name'].replace('.', os.sep)}.py")
    files = [Path(asked["cwd"], word.partition(".py:")[0] + ".py") for word in words if ".py" in word]
    return any(file.is_file() and _FRAMEWORK in file.read_text("utf-8", "replace") for file in files)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environ if name.startswith(_READ_AT_START)} - _READ_LATER
    found = {name: environ[name] for name in names}
    if found.get("PYTHONWARNINGS") == "ignore":  # a fork can do that too
        del found["PYTHONWARNINGS"]
    return found


_STARTED_WITH.update(_read_at_start(os.environ))


class Popen(subprocess.Popen[Any]):
    """As ``subprocess.Popen``; what a fork can become is forked."""

    def _execute_child(self, *given: Any) -> None:
        arguments, executable, preexec, _, passed, cwd, env, _, _, shell = given[:10]
        pipes, (session, group) = given[10:16], given[-2:]
        found = None if isinstance(arguments, (str, bytes)) or shell else program_of(arguments)
        environ = dict(os.environ if env is None else env)
        plain = executable is None and preexec is None and not passed and group in (-1, None)
        if found is None or not plain or not (_computes_nothing or Nursery.takes(environ)):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        child_input, _, _, child_output, _, child_errors = pipes
        files = [own if fd == -1 else fd for own, fd in enumerate((child_input, child_output, child_errors))]
        asked = {
            **found,
            "cwd": os.fspath(cwd or Path.cwd()),
            "environ": environ,
            "session": bool(session),
        }
        if _computes_nothing:
            self.pid = os.fork()
            if self.pid == 0:
                _become(asked, files)
        else:
            self.pid = _nursery(_uses_framework(asked)).child(asked, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Stands in for `vramfit.launch.starting.start`."""
    found = program_of(arguments)
    ours = found is not None and (found["kind"] == "code" or found["name"] in CHILDREN)
    if not ours:
        return starting.start(arguments, **options)
    return Popen(list(arguments), **options)


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run``."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as child:
        try:
            out, err = child.communicate(input, timeout)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(command, child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# -- The nursery ---------------------------------------------------------------------------------------------------


class Nursery:
    """A process that has imported everything and forks when it is asked to."""

    def __init__(self, *more: str, forked: bool = False) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._libc = ctypes.CDLL(None)
        with theirs:
            if not forked:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *more],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=Path(__file__).parents[1],
                    env={n: v for n, v in os.environ.items() if not n.startswith(_READ_AT_START)}
                    | _STARTED_WITH,
                )
            elif os.fork() == 0:
                _serve_beside(self._socket, theirs)
        atexit.register(self.close)

    def close(self) -> None:
        """Let it end."""
        self._socket.close()
        if os.getpid() == self.owner and hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()

    @staticmethod
    def takes(environ: Mapping[str, str]) -> bool:
        """Whether a child with these variables can be forked."""
        return sys.platform == "linux" and _read_at_start(environ) == _STARTED_WITH

    def child(self, asked: dict[str, Any], files: list[int]) -> int:
        """Fork a child of this process; returns its number."""
        with _lock:
            # The fork's own parent ends at once, so that the nearest subreaper above becomes it: this process.
            self._libc.prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], files)
                return int(self._socket.recv(100))
            finally:
                self._libc.prctl(_SUBREAPER, 0, 0, 0, 0)


_nurseries: dict[bool, Nursery] = {}
"""By whether they have imported the framework."""

_path: list[str] = []
"""Where a nursery finds modules, without the folder of its own script."""


def _nursery(framework: bool) -> Nursery:
    """That of this process; workers of pytest-xdist have their own."""
    found = _nurseries.get(framework)
    if found is None or found.owner != os.getpid():
        found = _nurseries[framework] = Nursery(*(_FRAMEWORK_MODULES if framework else ()))
    return found


def _serve_beside(ours: socket.socket, orders: socket.socket) -> NoReturn:
    """Be the nursery of the process that this one was forked from."""
    try:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # who waits for their end does not wait for this process
            os.dup2(nothing, stream)
        _serve(orders)
    finally:
        os._exit(0)


def _serve(orders: socket.socket) -> None:
    while True:
        text, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not text:
            return
        told, number = os.pipe()
        between = os.fork()
        if between == 0:
            _fork_and_end(number, json.loads(text), files)
        os.waitpid(between, 0)
        orders.send(os.read(told, 100))
        for fd in (told, number, *files):
            os.close(fd)


def _fork_and_end(number: int, asked: dict[str, Any], files: list[int]) -> NoReturn:
    """Fork once more and end; the fork goes on when it has its parent."""
    here = os.getpid()
    child = os.fork()
    if child:
        os.write(number, str(child).encode())
        os._exit(0)
    # Told by nothing else: the files of a process are closed before its children move.
    while os.getppid() == here:
        time.sleep(0.0005)
    _become(asked, files)


def _become(asked: dict[str, Any], files: list[int]) -> NoReturn:
    """Go on as ``python -m module ...``, and end as it would."""
    code = 1
    try:
        _settle(asked, files)
        try:
            _run(asked)
            code = 0
        except SystemExit as end:
            code = _code_of(end)
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 120  # as python does when its output cannot be flushed
    finally:
        os._exit(code)


def _run(asked: dict[str, Any]) -> None:
    """Run a module, a script or a text as ``__main__``."""
    name, main = asked["name"], ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = builtins
    if asked["kind"] == "module":
        sys.modules.pop(name, None)
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    if asked["kind"] == "script":
        main.__file__ = name
        code = compile(Path(name).read_bytes(), name, "exec")
    else:
        code = compile(name, "<string>", "exec")
    exec(code, main.__dict__)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _settle(asked: dict[str, Any], files: list[int]) -> None:
    """Take over what a new interpreter has from its parent, and forget what the one before it knew."""
    if asked["session"]:
        os.setsid()
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    copies = [os.dup(fd) for fd in files]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(3, 1024)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", closefd=False, errors="backslashreplace"
    )
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders are their maker's to delete
    name = asked["name"]
    first = {"module": asked["cwd"], "code": "", "script": str(Path(name).resolve().parent)}[asked["kind"]]
    sys.path[:] = [*([] if asked["safe"] else [first]), *_path]
    sys.argv = [{"module": "-m", "code": "-c", "script": name}[asked["kind"]], *asked["arguments"]]

    global _computes_nothing
    # Ranks are started by threads: a fork of one has the locks that others hold, and nobody who lets them go.
    _computes_nothing = name == "vramfit" and not {"--ranks", "--"} & set(asked["arguments"])
    # A script may compute before it starts a child, and what has computed cannot be forked.
    beside = asked["kind"] != "module" or name == "pytest" or (name == "vramfit" and not _computes_nothing)
    _nurseries.clear()
    if beside:
        _nurseries[False] = _nurseries[True] = Nursery(forked=True)
    interrupts.start = start if beside or _computes_nothing else starting.start


def _import_everything(more: Sequence[str]) -> None:
    import vramfit.analysis
    import vramfit.api
    import vramfit.calibrate.worker
    import vramfit.cli
    import vramfit.planner.planner_child
    import vramfit.record.record_child
    import vramfit.report
    import vramfit.techniques
    import vramfit.virtual.gpu
    import vramfit.virtual.ranks.one_process
    import vramfit.virtual.virtual_child
    from vramfit.planner.planner_questions import QUESTIONS

    # Not of `inference`: its caches import transformers.
    for package in (vramfit.analysis, vramfit.api, vramfit.report, vramfit.techniques):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    questions = {name.partition(":")[0] for name in QUESTIONS}
    for name in (*_MODULES, *sorted(questions), *more):
        importlib.import_module(name)
    _path[:] = sys.path[1:]
    # What was imported stays out of collections: runs collect often.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

    import tests.warm  # under the name by which forks find it

    tests.warm._import_everything(sys.argv[2:])
    tests.warm._serve(socket.socket(fileno=int(sys.argv[1])))
