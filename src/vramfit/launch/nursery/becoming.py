"""A fork becomes the program that was asked for: as ``__main__`` of its own, with its own input, output and signals."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from vramfit.launch.nursery.child_request import ChildRequest, ProgramKind

before_program: list[Callable[[ChildRequest], object]] = []
"""Called in each fork before the program begins; the tests have some."""

_STREAMS = ("stdin", "stdout", "stderr")
_HAS_ANNOTATIONS = "__annotations__" in vars(sys.modules["__main__"])
"""Whether this Python begins a main program with them."""

search_path = list(sys.path)
"""Where the nursery finds modules, before any fork changes that."""


def become(request: ChildRequest, files: Sequence[int]) -> NoReturn:
    """Go on as the program, and end as it would.

    Args:
        request: the program.
        files: its standard input, output and errors, which are closed here.
    """
    code = 1
    try:
        settle(request, files)
        try:
            _run(request)
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


def settle(request: ChildRequest, files: Sequence[int]) -> None:
    """Take over what a new interpreter gets from its parent, and forget what is the nursery's alone."""
    if request.session:
        os.setsid()
    _set_signals(request)
    copies = [os.dup(file) for file in files]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    for file in {*copies, *files}:  # the null device may stand for several
        if file >= len(_STREAMS):
            os.close(file)
    os.chdir(request.cwd)
    for name, value in request.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for at, name in enumerate(_STREAMS):
        stream = _opened(at, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders are their maker's to delete
    _draw_seeds()
    sys.path[:] = [*_own_path(request), *search_path]
    sys.argv = [
        request.name if request.kind is ProgramKind.SCRIPT else request.kind.value,
        *request.arguments,
    ]
    sys.orig_argv = list(request.words)
    for prepare in before_program:
        prepare(request)


def _draw_seeds() -> None:
    """Seed what libraries seeded by chance when they were imported; Python does so with its own after each fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_signals(request: ChildRequest) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(request.blocked))


def _own_path(request: ChildRequest) -> list[str]:
    """What Python adds to its search path for a program (``sys.path[0]``)."""
    if request.safe:
        return []
    if request.kind is ProgramKind.SCRIPT:
        return [str(Path(request.name).resolve().parent)]
    return [request.cwd] if request.kind is ProgramKind.MODULE else [""]


def _opened(number: int, name: str) -> Any:
    """A standard stream as Python opens it at its start, with the encoding that it chose for the nursery's."""
    model = getattr(sys, f"__{name}__")
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    raw.name = f"<{name}>"
    buffer: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
    stream: Any = io.TextIOWrapper(
        buffer,
        encoding=model.encoding,
        errors=model.errors,
        newline="\n",
        line_buffering=number == 2 or raw.isatty(),
        write_through=number != 0 and bool(os.environ.get("PYTHONUNBUFFERED")),
    )
    stream.mode = "r" if number == 0 else "w"
    return stream


def _run(request: ChildRequest) -> None:
    """Run a module, a script or Python source as ``__main__``."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = builtins
    if _HAS_ANNOTATIONS:
        main.__annotations__ = {}
    if request.kind is ProgramKind.MODULE:
        sys.modules.pop(request.name, None)
        runpy._run_module_as_main(request.name)  # type: ignore[attr-defined]
        return
    if request.kind is ProgramKind.SCRIPT:
        main.__file__, main.__dict__["__cached__"] = request.name, None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", request.name)
        code = compile(Path(request.name).read_bytes(), request.name, "exec")
    else:
        code = compile(request.name, "<string>", "exec")
    exec(code, main.__dict__)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1
