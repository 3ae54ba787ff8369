"""Children of tests that begin with torch and vramfit imported: importing takes most of what a small run takes.

They are forks of a `vramfit.launch.nursery`, which here imports everything and forks for more than a user's does: for
any Python program, with other variables, as long as none is read when an interpreter starts. Only the start of the
interpreter is not tested that way: some of `tests.virtual.test_runner` and of `launch`, and all tests of `files`, start
theirs cold. Programs that use transformers have a nursery of their own, which has imported that too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pkgutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from vramfit.launch import interrupts, starting
from vramfit.launch.nursery import Nursery, WarmPopen, becoming
from vramfit.launch.nursery.child_request import ChildRequest, ProgramKind, request_for
from vramfit.launch.nursery.nursery_client import READY
from vramfit.launch.nursery.nursery_process import serve

CHILDREN = frozenset(
    {
        "vramfit",
        "vramfit.calibrate.worker",
        "vramfit.launch.tasks.task_child",
        "vramfit.planner.planner_child",
        "vramfit.record.record_child",
        "vramfit.virtual.virtual_child",
    }
)
"""What vramfit starts itself, or a test in the place of that."""

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


def _uses_framework(asked: ChildRequest) -> bool:
    """Whether a program, or a file that it is given, speaks of the framework."""
    words = [asked.name, *asked.arguments]
    if asked.kind is ProgramKind.MODULE:
        words.append(f"{asked.name.replace('.', os.sep)}.py")
    files = [Path(asked.cwd, word.partition(".py:")[0] + ".py") for word in words if ".py" in word]
    return any(file.is_file() and _FRAMEWORK in file.read_text("utf-8", "replace") for file in files)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environ if name.startswith(_READ_AT_START)} - _READ_LATER
    found = {name: environ[name] for name in names}
    if found.get("PYTHONWARNINGS") == "ignore":  # a fork can do that too
        del found["PYTHONWARNINGS"]
    return found


_STARTED_WITH.update(_read_at_start(os.environ))


class Popen(WarmPopen):
    """As ``subprocess.Popen``; what a fork can become is forked."""

    def __init__(self, arguments: Any, **options: Any) -> None:
        super().__init__(arguments, nursery=None, **options)

    def asked(
        self, arguments: Any, cwd: Any, environ: Mapping[str, str]
    ) -> tuple[Nursery, ChildRequest] | None:
        if sys.platform != "linux" or isinstance(arguments, str | bytes):
            return None
        if _read_at_start(environ) != _STARTED_WITH:
            return None
        # What a variable sets, a fork has as well.
        asked = request_for(arguments) or request_for(arguments, starting.own_options())
        if asked is None:
            return None
        asked = replace(asked, cwd=os.fspath(cwd or Path.cwd()))
        return _Itself() if _computes_nothing else _nursery(_uses_framework(asked)), asked


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Stands in for `vramfit.launch.starting.start`."""
    asked = request_for(arguments) or request_for(arguments, starting.own_options())
    ours = asked is not None and (asked.kind is ProgramKind.CODE or asked.name in CHILDREN)
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


# -- Nurseries -----------------------------------------------------------------------------------------------------


_computes_nothing = False
"""Whether this process may fork by itself: it is a fork, and one of ours that leaves computing to its children."""


class _Own(Nursery):
    """A process of its own that imports everything."""

    def __init__(self, *more: str) -> None:
        environ = {n: v for n, v in os.environ.items() if not n.startswith(_READ_AT_START)}
        super().__init__(more, environ | _STARTED_WITH)
        atexit.register(self.close)

    def command(self, number: int) -> list[str]:
        return [sys.executable, __file__, str(number), *self._modules]


class _Beside(Nursery):
    """A fork of this process, made before it has computed anything."""

    def __init__(self) -> None:
        super().__init__(())
        self._made, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with theirs:
            if os.fork() == 0:
                _serve_beside(self._made, theirs, parent)
        atexit.register(self.close)

    def connect(self) -> socket.socket:
        return self._made


class _Itself(Nursery):
    """This process."""

    def __init__(self) -> None:
        super().__init__(())

    def child(self, request: ChildRequest, files: Sequence[int]) -> int:
        number = os.fork()
        if number == 0:
            becoming.become(request, files)
        return number


_nurseries: dict[bool, Nursery] = {}
"""By whether they have imported the framework."""


def _nursery(framework: bool) -> Nursery:
    """That of this process; workers of pytest-xdist have their own."""
    found = _nurseries.get(framework)
    if found is None or found.owner != os.getpid():
        found = _nurseries[framework] = _Own(*(_FRAMEWORK_MODULES if framework else ()))
    return found


def _serve_beside(ours: socket.socket, orders: socket.socket, parent: int) -> NoReturn:
    """Be the nursery of the process that this one was forked from."""
    try:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # who waits for their end does not wait for this process
            os.dup2(nothing, stream)
        orders.send(READY)
        serve(orders, parent)
    finally:
        os._exit(0)


def _prepare(asked: ChildRequest) -> None:
    """In a fork: let it start its own children warm, too."""
    os.closerange(3, 1024)
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    global _computes_nothing
    # Ranks are started by threads: a fork of one has the locks that others hold, and nobody who lets them go.
    _computes_nothing = asked.name == "vramfit" and not {"--ranks", "--"} & set(asked.arguments)
    # A script may compute before it starts a child, and what has computed cannot be forked.
    beside = (
        asked.kind is not ProgramKind.MODULE
        or asked.name == "pytest"
        or (asked.name == "vramfit" and not _computes_nothing)
    )
    _nurseries.clear()
    if beside:
        _nurseries[False] = _nurseries[True] = _Beside()
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
    becoming.search_path[:] = sys.path[1:]
    becoming.before_program.append(_prepare)
    # What was imported stays out of collections: runs collect often.
    gc.collect()
    gc.freeze()


def _main(number: str, *more: str) -> None:
    parent = os.getppid()
    _import_everything(more)
    orders = socket.socket(fileno=int(number))
    orders.send(READY)
    serve(orders, parent)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

    import tests.warm  # under the name by which forks find it

    tests.warm._main(*sys.argv[1:])
