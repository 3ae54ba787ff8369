"""The child's side of a run: becomes ``python script.py`` (or ``python -m module``), and ends as python would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import io
import multiprocessing.process
import os
import runpy
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from vramfit.launch.interrupts import INTERRUPTED
from vramfit.launch.stopping import Stopping
from vramfit.patching import PatchStack

_PACKAGE = Path(__file__).resolve().parents[1]
OWN_FOLDERS = tuple(
    f"{_PACKAGE / name}{os.sep}" for name in ("capture", "files", "launch", "record", "virtual")
)
"""Code that stands between a program and torch without being the program's: its frames are not shown."""

Finish = Callable[[int, BaseException | None], None]
"""Leaves a run's results behind, given the program's exit code and the exception that ended it."""


def run_to_end(command: list[str], finish: Finish, patches: PatchStack, stopping: Stopping) -> int:
    """Run a program and everything that python does at its end; returns its exit code.

    Args:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        finish: called once, also where the program leaves by ``os._exit``.
        patches: replaces ``os._exit`` while the program runs.
    """
    _save_before_exit(patches, finish, stopping)
    code, error = _wind_down(*run_program(command, stopping))
    code, error = stopping.ended(code, error)
    threading.excepthook = _untold
    patches.undo()
    finish(code, error)
    _finalize()
    return code


def leave(code: int) -> Any:
    """End the process at once: autograd's C++ threads outlive the interpreter and could abort a finished run."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed from the start
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as python does when its output cannot be flushed
    os._exit(code)


def end_interpreter(code: int) -> Any:
    """End the process as Python does, with its threads joined and its exit functions called, but without teardown.

    Autograd's and gloo's C++ threads outlive the interpreter's objects, and now and then abort a finished program.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    leave(code)


def leave_after(main: Callable[[], int]) -> Any:
    """Do a child's work and end the process; an interrupt before the program runs shows in the exit code alone."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    leave(code)


def _save_before_exit(patches: PatchStack, finish: Finish, stopping: Stopping) -> None:
    """Save the results before ``os._exit`` ends the process at once. Forked children leave as they would."""
    original, owner = os._exit, os.getpid()

    def leave_at_once(status: int) -> NoReturn:
        if os.getpid() == owner:
            code, _ = stopping.ended(status & 0xFF, None)
            finish(code, None)
            original(code)
        original(status)

    patches.set(os, "_exit", leave_at_once)


def _finalize() -> None:
    """Do what an interpreter does after its exit handlers: drop the program's globals, and close what they held."""
    main_module = sys.modules.get("__main__")
    # runpy drops the globals of a module itself.
    if main_module is not None and main_module.__dict__ is not globals():
        main_module.__dict__.clear()
    gc.collect()
    for item in gc.get_objects():  # files that something else still holds
        # By type: asking an object for its class can run code of its own.
        if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):
                item.flush()


def run_program(command: list[str], stopping: Stopping) -> tuple[int, BaseException | None]:
    """Run a script or module as ``__main__``; returns its exit code and the exception that ended it, if any.

    A ``SystemExit`` is one only where it has a message.
    """
    try:
        become(command)
    except SystemExit as stop:
        return _exit_code(stop), stop if _says_why(stop) else None
    except KeyboardInterrupt as error:
        _print_exception(error)
        return INTERRUPTED, error
    except BaseException as error:
        if not stopping.is_of_the_stop(error):
            _print_exception(error)
        return 1, error
    finally:
        stopping.over()
    return 0, None


def become(command: list[str], sources: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Run a script or a module in this process as ``__main__``, whatever it raises.

    Args:
        command: as python would be given: the script and its arguments, or ``-m``, a module and its arguments.
        sources: another text of a script, by its absolute path.
    """
    if command[0] == "-m":
        _run_module(command[1], command[2:])
    else:
        _run_script(command[0], command[1:], sources)


def _run_script(script: str, arguments: list[str], sources: Mapping[str, bytes]) -> None:
    """Run a file as ``python script.py`` does: its folder leads ``sys.path``, and it is the module ``__main__``."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    script = os.path.join(os.getcwd(), script)  # Python/initconfig.c: config_run_filename_abspath
    source = sources.get(os.path.abspath(script))
    if source is None:
        with open(script, "rb") as file:
            source = file.read()
    code = compile(source, script, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m`` does: the current folder leads ``sys.path``."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd())
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        # runpy says so itself when the module to run is missing; anything else is the program's own failure.
        if error.__traceback__ is not None and _innermost_file(error) in ("<frozen runpy>", runpy.__file__):
            print(f"{sys.executable}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        raise


def _innermost_file(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename if trace is not None else ""


def _says_why(stop: SystemExit) -> bool:
    """Whether a program left with a message rather than a number: ``sys.exit("no data")``."""
    return stop.code is not None and not isinstance(stop.code, int)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _print_exception(error: BaseException) -> None:
    """Show the program's exception as python would on a card: without our frames."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or on a full disk
        sys.stdout.flush()
    if sys.excepthook is not sys.__excepthook__:
        trace = _without_ours(trace)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return
    told = traceback.TracebackException(type(error), error, trace)
    _hide_ours(told, set())
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write("".join(told.format()))


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without our frames, for a hook that prints it itself, such as torch's in a process group."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = _without_ours(trace.tb_next)
    return trace


def _hide_ours(told: traceback.TracebackException, seen: set[int]) -> None:
    """Remove our frames from an exception and from those that led to it."""
    if id(told) in seen:
        return
    seen.add(id(told))
    told.stack = traceback.StackSummary.from_list(
        [frame for frame in told.stack if not _is_ours(frame.filename)]
    )
    for other in (told.__cause__, told.__context__):
        if other is not None:
            _hide_ours(other, seen)


def _is_ours(filename: str) -> bool:
    return filename.startswith(OWN_FOLDERS) or filename in ("<frozen runpy>", runpy.__file__)


def _wind_down(code: int, error: BaseException | None) -> tuple[int, BaseException | None]:
    """Do what an interpreter does at its end: wait for threads, run the exit handlers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as raised:  # by a handler of a signal; python leaves the threads to themselves then
        _print_exception(raised)
        if isinstance(raised, KeyboardInterrupt):
            code, error = INTERRUPTED, raised
    try:
        atexit._run_exitfuncs()
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as raised:
        _print_exception(raised)
    return code, error


def _untold(arguments: threading.ExceptHookArgs) -> None:
    """Silence threads that outlive the program and fail as things are taken down; under python they would just stop."""


# -- Processes that the program starts: nobody measures them, and the report must say so ----------------------


OTHER_PROCESSES = (
    "other-processes",
    "the program started other Python processes: what they allocate on a card is not counted",
)
"""Code and text of the warning."""


def watch_processes(tell: Callable[[], object], patches: PatchStack) -> None:
    """Call `tell` where the program starts a Python process, except for a DataLoader's workers: they use no card."""
    start, popen = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__

    def counted_start(self: multiprocessing.process.BaseProcess) -> None:
        target = getattr(self, "_target", None)
        if not getattr(target, "__module__", "").startswith("torch.utils.data"):
            tell()
        start(self)

    def counted_popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if _is_python(args):
            tell()
        popen(self, args, *rest, **options)

    patches.set(multiprocessing.process.BaseProcess, "start", counted_start)
    patches.set(subprocess.Popen, "__init__", counted_popen)


def _is_python(args: Any) -> bool:
    """Whether a command line starts Python or one of torch's launchers."""
    first = (
        args.split()[:1]
        if isinstance(args, str)
        else list(args)[:1]
        if isinstance(args, (list, tuple))
        else [args]
    )
    name = Path(os.fsdecode(first[0])).name if first else ""
    return name.startswith(("python", "torchrun", "accelerate", "deepspeed"))
