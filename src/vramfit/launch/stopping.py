"""The child's side of an early end: the program is ended from inside, and what it had done is reported as a verdict.

NOTE [How a program is ended]
1. ``SystemExit`` is raised in the main thread, so that ``finally``, context managers and ``atexit`` act as for
   `sys.exit`. It is a plain one: threads end silently by it, those of a subclass would print it
   (Modules/_threadmodule.c, thread_excepthook). Steps raise it where a forward or backward pass begins; the parent, for
   time, by SIGURG, which nobody else uses and which by default does nothing.
2. A program that catches it is found out: no exception of ours is being handled, and yet it works on. It is raised
   again, and the fourth time the process ends at once with the results saved.
3. Where the main thread has come to its end and waits for others, as python does, those are told by themselves, each
   where it next works on the card.
4. What does not end within some seconds is ordered to leave by the parent, and killed if it cannot hear it (it sits in
   C code); the journal of the trace is the result then.

SIGTERM, where the program has no handler, ends it at once as it would without us, the results saved before. SIGINT is
as python has it: a KeyboardInterrupt that the program may catch.

NOTE [Handlers that raise]: a signal to the whole group also kills the workers of a DataLoader, and torch's handler of
SIGCHLD raises an error of that wherever the main thread is: inside our handler of SIGTERM before its first line, or
while results are saved. So what a SIGTERM did is read from the child's notes of signals, which C code writes, and
handlers are taken away before results are saved.

NOTE [No exception between dispatcher and mode]: before each op under a mode torch's C++ asks a function of Python for
a rule (see torch_patches of the virtual GPU), where it can take no exception: the process would abort. Handlers run
where a function of Python begins, so one that raises may be called there. It then does nothing, and the signal is sent
once more, a moment later: by the parent where it is an order of its own, else by a thread.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from vramfit.launch.interrupts import INTERRUPTED, signals_noted
from vramfit.launch.status import ChildState, Order, Status, StatusWriter, read_order
from vramfit.options.limits import Limits
from vramfit.patching import PatchStack
from vramfit.trace import Run
from vramfit.trace.outcome import STEADY, UNTOLD, End, Progress, Unit

ORDERS = getattr(signal, "SIGURG", None)
"""The signal by which a parent says that there is an order; None where the system has none."""

_OURS = "_vramfit_stop"
_TIMES = 3
"""How often a program is told to end before the process does."""
_AGAIN = 1e-3
"""Seconds after which a signal that came at the wrong moment is sent once more."""
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
# What is replaced while a program runs, as it was before.
_EXIT, _SET_SIGNAL, _GET_SIGNAL = os._exit, signal.signal, signal.getsignal
_START_THREAD, _SLEEP = _thread.start_new_thread, time.sleep


class StepSink(Protocol):
    """Receives the steps of a program, and may end it; see `Stopping`."""

    lock: Any

    @property
    def asked(self) -> bool:
        """Whether the program was told to end."""

    def note(self, *, steps: int, unit: Unit, steady: int, module: str = "") -> None:
        """Hear how far the program has come."""

    def enough(self) -> bool:
        """Whether the steps so far are as many as were asked for."""

    def stop(self, end: End) -> None:
        """Tell the program to end."""

    def check(self) -> None:
        """End the program if it was told to and does not do so."""


class Stopping:
    """Ends the program of this process when it is time, and knows what ended it.

    Attributes:
        lock: what the virtual GPU or the recorder holds while its figures change; None if nothing does.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits = limits
        self.lock: Any = None
        self.on_step: Callable[[], object] = lambda: None
        self._folder = folder
        self._writer = StatusWriter(folder)
        # Kept separately: threads count steps while the main one is being ended.
        self._state, self._end, self._seen = ChildState.STARTING, End.PROGRAM, UNTOLD
        self._own_interrupt = self._own_terminate = False
        self._owner = os.getpid()
        self._told = 0
        self._over = False
        self._save: Callable[[int], None] | None = None

    # -- what the program does -----------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the program has come, and what ended it."""
        return replace(self._seen, end=self._end)

    @property
    def asked(self) -> bool:
        """Whether the program was told to end."""
        return self._end is not End.PROGRAM

    def note(self, *, steps: int, unit: Unit, steady: int, module: str = "") -> None:
        """Report how far the program has come."""
        if os.getpid() == self._owner:
            self._seen = Progress(steps=steps, unit=unit, steady=steady, module=module)
            self._tell()
            self.on_step()

    def enough(self) -> bool:
        """Whether the program has made as many steps as were asked for."""
        found, limits = self._seen, self.limits
        return (limits.steps is not None and found.steps >= limits.steps) or (
            limits.steady and found.steady >= STEADY
        )

    def stop(self, end: End) -> None:
        """Tell the program to end; where the program runs, this raises.

        Raises:
            SystemExit: see NOTE [How a program is ended].
        """
        if os.getpid() != self._owner or self._state is ChildState.SAVING:
            return
        self._begin_end(end)
        in_main = threading.current_thread() is threading.main_thread()
        if not (in_main or self._over) and ORDERS is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, ORDERS)
        self.check()

    def check(self) -> None:
        """End the program here, where it works, if it was told to end and has not.

        Raises:
            SystemExit: see NOTE [How a program is ended].
        """
        if not self.asked or os.getpid() != self._owner:
            return
        if threading.current_thread() is threading.main_thread():
            if self._over or _is_handled():
                return
            self._told += 1
            if self._told > _TIMES:
                self.leave()
        stop = SystemExit(0)
        setattr(stop, _OURS, True)
        raise stop

    # -- its end -------------------------------------------------------------------------------------------------

    def install(self, save: Callable[[int], None], patches: PatchStack) -> None:
        """Listen to orders and to SIGTERM until `patches` are undone.

        `save` leaves the results of what has happened so far, given an exit code.
        """
        self._save = save
        if ORDERS is not None:
            patches.call(partial(_SET_SIGNAL, ORDERS, _SET_SIGNAL(ORDERS, self._obey)))
        self._listen(patches)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        self._tell(ChildState.RUNNING)

    def over(self) -> None:
        """Note that the main thread is at its end: nothing is raised in it any longer, though others may work on."""
        self._over = True

    def is_of_the_stop(self, error: BaseException) -> bool:
        """Whether an exception that ended the program comes from its being told to end.

        A DataLoader says that its worker died where both were sent the signal; ours may arrive a moment later.
        """
        if _is_out_of_memory(error):
            return False
        if self.asked:
            return True
        if _is_of_worker(error):
            threading.Event().wait(0.5)  # handlers of signals run meanwhile
            return self.asked or self._is_terminated() or signals_noted(self._folder) > 0
        return False

    def ended(self, code: int, error: BaseException | None) -> tuple[int, BaseException | None]:
        """The exit code and the error to report for a program that has come to its end."""
        _disarm_handlers()  # what is left to do is ours, and short
        if _is_out_of_memory(error):  # it does not fit, whatever else was going to end it
            found = code, error
        elif self.progress.was_asked_for:
            found = 0, None
        elif self._is_terminated():
            self._end = End.TERMINATED
            self.leave()
            found = 128 + signal.SIGTERM, None  # results are being saved already, by the main thread
        elif self._is_interrupted(code, error):
            self._end = End.INTERRUPTED
            found = INTERRUPTED, None
        else:
            found = code, error
        self._tell(ChildState.SAVING)
        return found

    def _is_terminated(self) -> bool:
        """Whether a SIGTERM came that the program does not handle. See NOTE [Handlers that raise]."""
        if self._end is End.TERMINATED:
            return True
        return not self._own_terminate and signals_noted(self._folder, signal.SIGTERM) > 0

    def _is_interrupted(self, code: int, error: BaseException | None) -> bool:
        """Whether an interrupt ended the program: it may have caught it, and failed later for reasons of its own."""
        if isinstance(error, KeyboardInterrupt):
            return True
        if code == 0 or self._own_interrupt or not signals_noted(self._folder):
            return False
        return error is None or isinstance(error, SystemExit) or _is_of_interrupt(error)

    def told(self, run: Run) -> Run:
        """The run with what is known of its progress."""
        return replace(run, progress=self.progress)

    def leave(self) -> None:
        """Save the results and end the process, whatever the program is doing, with nothing left behind."""
        if self._state is ChildState.SAVING:
            return
        _disarm_handlers()
        self._over = True
        self._tell(ChildState.SAVING)
        terminated = self._end is End.TERMINATED
        code = INTERRUPTED if self._end is End.INTERRUPTED else 0
        try:
            _end_children()
            if self._save is not None:
                self._save(-signal.SIGTERM if terminated else code)
        finally:  # without results the parent reads the journal
            if terminated:
                with contextlib.suppress(ValueError):  # the program left by `os._exit` in another thread
                    _SET_SIGNAL(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), signal.SIGTERM)
                code = 128 + signal.SIGTERM
            _flush()
            _EXIT(code)

    # -- signals -------------------------------------------------------------------------------------------------

    def _obey(self, number: int, frame: FrameType | None) -> None:
        """Carry out an order of the parent, which repeats it as long as nothing comes of it."""
        del number
        if (
            os.getpid() != self._owner
            or self._busy()
            or self._state is ChildState.SAVING
            or _asks_for_rule(frame)
        ):
            return
        order = read_order(self._folder)
        if order is None:
            self.check()
        elif order[0] is Order.STOP:
            self.stop(order[1])
        elif order[0] is Order.LEAVE:
            self._begin_end(order[1])
            self.leave()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT as python does. See NOTE [No exception between dispatcher and mode]."""
        if _asks_for_rule(frame):
            _START_THREAD(_send_soon, (number,))
        else:
            signal.default_int_handler(number, frame)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, unseen by the program; where the figures are just changing, the parent will order it."""
        del frame
        if os.getpid() != self._owner:
            _SET_SIGNAL(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._busy() and self._state is not ChildState.SAVING:
            self._end = End.TERMINATED
            self.leave()

    def _busy(self) -> bool:
        """Whether the main thread, in which handlers run, was interrupted while it changed the figures."""
        return self.lock is not None and self.lock._is_owned()

    def _listen(self, patches: PatchStack) -> None:
        """Handle SIGTERM and SIGINT unseen by the program, and note which signals it handles itself."""
        pythons: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        handlers: dict[int, Any] = {signal.SIGTERM: self._terminate, signal.SIGINT: self._interrupt}
        ours = {number: handlers[number] for number in pythons if _GET_SIGNAL(number) == pythons[number]}
        for number, handler in ours.items():
            _SET_SIGNAL(number, handler)

        def shown(number: int) -> Any:
            found = _GET_SIGNAL(number)
            return pythons[number] if number in ours and found == ours[number] else found

        def replaced(number: int, handler: Any) -> Any:
            before = shown(number)
            ask = number in ours and handler == pythons[number]
            _SET_SIGNAL(number, ours[number] if ask and os.getpid() == self._owner else handler)
            self._note_handler(number, handler)
            return before

        def undo() -> None:
            for number, handler in ours.items():
                if _GET_SIGNAL(number) == handler:
                    _SET_SIGNAL(number, pythons[number])

        patches.call(undo)
        patches.set(signal, "signal", replaced)
        patches.set(signal, "getsignal", shown)

    def _note_handler(self, number: int, handler: Any) -> None:
        if os.getpid() != self._owner:
            return
        own = handler not in _DEFAULTS
        # For good: what came while it handled them is not held against it once it does no longer.
        if number == signal.SIGINT:
            self._own_interrupt |= own
        elif number == signal.SIGTERM:
            self._own_terminate |= own
        self._tell()

    def _forget(self) -> None:
        """Let a forked child end by a signal as any other process does."""
        for number in (signal.SIGTERM, ORDERS):
            if number is not None and _GET_SIGNAL(number) in (self._terminate, self._obey):
                _SET_SIGNAL(number, signal.SIG_DFL)

    def _begin_end(self, end: End) -> None:
        """Note that the program is asked to end; the first reason counts."""
        if not self.asked:
            self._end = end
        self._tell(ChildState.STOPPING)

    def _tell(self, state: ChildState | None = None) -> None:
        self._state = self._state if state is None else state
        status = Status(
            state=self._state,
            own_interrupt=self._own_interrupt,
            own_terminate=self._own_terminate,
            progress=self.progress,
        )
        self._writer.write(status)


def _disarm_handlers() -> None:
    """Let no handler of a signal do anything any longer; signals are still noted. See NOTE [Handlers that raise].

    Only the main thread may do this, and handlers run in no other.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    while True:
        with contextlib.suppress(
            BaseException
        ):  # of a handler, which raises once at most: then it is replaced
            for number in signal.valid_signals():
                if callable(_GET_SIGNAL(number)):
                    _SET_SIGNAL(number, _do_nothing)
            return


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that no longer matters."""


def _asks_for_rule(frame: FrameType | None) -> bool:
    """Whether torch is asking whether a mode has a rule: see NOTE [No exception between dispatcher and mode]."""
    registry = sys.modules.get("torch._library.simple_registry")
    if registry is None or frame is None:
        return False
    ours = registry.find_torch_dispatch_rule.__code__  # it may have been changed
    return frame.f_code is ours or frame.f_code.co_filename == registry.__file__


def _send_soon(number: int) -> None:
    """Send a signal to the main thread again, from another one."""
    _SLEEP(_AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _is_handled() -> bool:
    """Whether an exception of ours is being handled: the program is on its way out."""
    return any(getattr(error, _OURS, False) for error in _with_contexts(sys.exc_info()[1]))


def _is_of_interrupt(error: BaseException) -> bool:
    """Whether an exception comes from an interrupt that something between turned into another exception."""
    return any(
        isinstance(one, KeyboardInterrupt) or "KeyboardInterrupt" in str(one) or _is_of_worker(one)
        for one in _with_contexts(error)
    )


def _is_of_worker(error: BaseException) -> bool:
    """Whether an exception says that a worker of a DataLoader has died."""
    return "DataLoader worker" in str(error)


def _is_out_of_memory(error: BaseException | None) -> bool:
    torch = sys.modules.get("torch")  # the parent imports this module, and has none
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that were being handled when it was raised."""
    seen: set[int] = set()  # a program can tie them to a ring
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__context__


def _flush() -> None:
    """Write out what was printed, even if nobody reads the pipe or the program was interrupted while printing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            stream.flush()


def _end_children() -> None:
    """Kill the processes of multiprocessing, such as the workers of a DataLoader: nobody will wait for them."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.kill()
    # From Python 3.14 on these are forked by a process of its own, which would end a moment after this one.
    server = sys.modules.get("multiprocessing.forkserver")
    if server is not None and (process := server._forkserver._forkserver_pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
