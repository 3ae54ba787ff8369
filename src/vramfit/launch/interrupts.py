"""Signals that reach the parent of a run: passed on to the child, an interrupt only if the child did not get it itself.

NOTE [Who was interrupted]
A terminal interrupts every process of its foreground group, the child among them; a supervisor interrupts the one
process that it started. Passed on regardless, Ctrl-C would count twice, and programs take a second one as the wish to
end at once. So the child notes each SIGINT when it arrives (Modules/signalmodule.c, trip_signal, writes it to the
wakeup descriptor before any handler runs, whichever the program has), and the parent passes on those that are not
noted soon. A program that sets a wakeup descriptor of its own (asyncio's add_signal_handler) notes nothing: there
Ctrl-C does count twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from vramfit.launch.nursery import start

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that an interrupt ended, as a shell gives it."""

programs_run: list[str] = []
"""Programs that this process has run to an end of theirs: an interrupt that comes later is none of a program's."""

_NOTES = "signals"
"""In a job's folder: a byte for each signal that the child got."""
_SOON, _LOOK = 0.25, 0.01
"""Seconds within which an interrupt of the whole group is noted, and between two looks."""
_KEPT = ContextVar("signals of the caller are kept", default=False)
_GROUP: ContextVar[SignalGroup | None] = ContextVar("children that get the same signals", default=None)
_WATCH = 0.1
"""Seconds between two looks at a child that is watched."""


def note_interrupts(folder: Path) -> None:
    """In the child: note each signal when it arrives, SIGINT from now on. See NOTE [Who was interrupted]."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
    signal.set_wakeup_fd(os.open(folder / _NOTES, flags, 0o600), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_note_no_longer)
    if hasattr(signal, "pthread_sigmask"):  # see `_interrupts_held_back`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def leave_at_interrupt() -> Callable[[], None]:
    """In the child: end at once at an interrupt, until what is returned is called: nothing of the program has run.

    A ``KeyboardInterrupt`` would come up inside an import, where torch or a library may turn it into something else.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return lambda: None

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)

    def as_python_does() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return as_python_does


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let a child that is started now get no SIGINT before it notes them: its first imports end in no traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_noted(folder: Path, number: int = signal.SIGINT) -> int:
    """How often a child got a signal, as far as it noted that."""
    try:
        return (folder / _NOTES).read_bytes().count(number)
    except FileNotFoundError:  # it has only just begun
        return 0


def _note_no_longer() -> None:
    with contextlib.suppress(ValueError):  # only a main thread may
        signal.set_wakeup_fd(-1)


class Signals:
    """What the parent does with its signals while a child runs."""

    def __init__(self, folder: Path) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.terminated: int | None = None
        """The last demand to end, None without one."""
        self.starting = False
        """Whether a child is about to be there: it gets what comes meanwhile."""
        self.missed = False
        """Whether there was an interrupt while the child was about to be there, which a later fork does not get."""
        self.interrupts = 0
        """How many interrupts there were."""
        self._folder = folder
        self._accounted = 0

    @property
    def interrupted(self) -> bool:
        """Whether there was an interrupt."""
        return self.interrupts > 0

    def interrupt(self) -> None:
        """Pass an interrupt on, unless the child gets it too."""
        self.interrupts += 1
        child, until = self.child, time.monotonic() + _SOON
        if child is None:
            raise KeyboardInterrupt
        while signals_noted(self._folder) <= self._accounted:
            if time.monotonic() > until:
                child.send_signal(signal.SIGINT)
                break
            time.sleep(_LOOK)
        self._accounted += 1

    def terminate(self, number: int) -> None:
        """Pass SIGTERM on; before there is a child, end with a shell's exit code for it, and leave no file behind.

        Raises:
            SystemExit: there is no child yet.
        """
        self.terminated = number
        if self.child is not None:
            self.child.send_signal(number)
        elif not self.starting:
            raise SystemExit(128 + number)

    def started(self, child: subprocess.Popen[bytes]) -> None:
        """Note that there is a child now, and pass on what came while it was started."""
        self.child, self.starting = child, False
        if self.terminated is not None:
            child.send_signal(self.terminated)
        if self.missed:
            self.missed = False
            self.interrupt()


def run_child(
    arguments: Sequence[str],
    signals: Signals,
    *,
    watch: Callable[[subprocess.Popen[bytes]], object] | None = None,
    **options: Any,
) -> int:
    """Start a child and wait for its end, passing signals on; returns its exit code, negative for a signal.

    Args:
        watch: called some times a second while it runs.

    Raises:
        UsageError: the child cannot be started.
    """
    signals.starting = True
    with _interrupts_held_back():
        started = start(arguments, **options)
    with started as child:
        signals.started(child)
        while True:
            try:
                return child.wait(None if watch is None else _WATCH)
            except subprocess.TimeoutExpired:
                if watch is not None:
                    watch(child)
            except KeyboardInterrupt:  # from a handler of the user's own
                signals.interrupt()
            except BaseException:  # a handler may raise it too, and then nobody wants to wait for the child
                child.terminate()
                raise


@contextlib.contextmanager
def terminated_by_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what was set up is taken down; a handler of the user's own stays."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Let `passed_on` leave all handlers of this process alone, for a program that calls us and has its own.

    An interrupt still reaches the child, by the ``KeyboardInterrupt`` that Python's handler raises; the child notices a
    process that a signal ended.
    """
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


class SignalGroup:
    """Children of several threads, each of which waits for one: the main thread has their signals."""

    def __init__(self) -> None:
        self.interrupted = False
        """Whether there was a signal."""
        self.terminated: int | None = None
        """The last demand to end, None without one."""
        self._members: list[Signals] = []

    @contextlib.contextmanager
    def has(self, signals: Signals) -> Iterator[None]:
        """Let a child be one of them."""
        self._members.append(signals)
        try:
            yield
        finally:
            self._members.remove(signals)

    def interrupt(self) -> None:
        """Pass an interrupt on to all that do not get it too."""
        self.interrupted = True
        for signals in tuple(self._members):
            if signals.child is not None:
                signals.interrupt()
            elif signals.starting:
                signals.missed = True

    def terminate(self, number: int) -> None:
        """Pass SIGTERM on to all."""
        self.interrupted, self.terminated = True, number
        for signals in tuple(self._members):
            signals.terminated = number  # also where the child is only being started
            if signals.child is not None:
                signals.child.send_signal(number)


@contextlib.contextmanager
def passed_on_to_all() -> Iterator[SignalGroup]:
    """Pass SIGINT and SIGTERM on to the children that other threads run meanwhile, in copies of this context."""
    group = SignalGroup()
    token = _GROUP.set(group)
    with passed_on(Path()) as own:
        own.interrupt = group.interrupt  # type: ignore[method-assign]
        own.terminate = group.terminate  # type: ignore[method-assign]
        try:
            yield group
        finally:
            _GROUP.reset(token)


@contextlib.contextmanager
def passed_on(folder: Path) -> Iterator[Signals]:
    """Pass SIGINT and SIGTERM on to the child named inside; handlers of the user's own are left alone."""
    signals = Signals(folder)

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        signals.interrupt()

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        signals.terminate(number)

    if _KEPT.get() or threading.current_thread() is not threading.main_thread():
        group = _GROUP.get()
        with contextlib.nullcontext() if group is None else group.has(signals):
            yield signals
        return
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, terminate)
    if before[0] is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield signals
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            if handler is not None:  # it was not set from Python
                signal.signal(number, handler)
