"""The clocks that a program reads: this machine's, with a warning where it times the card by them, or the card's.

NOTE [Clocks of programs]
A program times its steps by Python's clocks, and prints tokens a second. On a virtual card these say how quickly this
machine follows the program. `ProgramClock.SIMULATED` lets the clocks that the program and its libraries read follow the
card instead: queued work counts as done, as after ``torch.cuda.synchronize()``. So do ``timeit`` and
``torch.utils.benchmark``, which time code for a program. The rest of the standard library and of torch, and vramfit,
wait and poll by the real clocks. Each reading takes `_READING_US`, so that a program which waits for a moment gets
there; sleeping is real, and counts too.

`datetime` reads the system's clock in C and stays real, as does a clock that a program keeps in an object of its own.
"""

from __future__ import annotations

import re
import sys
import time
import timeit
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from vramfit.options.clock_choice import ProgramClock
from vramfit.patching import PatchStack
from vramfit.trace.frames import Origin, origin
from vramfit.virtual.op_runner import OpRunner

_READING_US = 1.0
_SECONDS = {"time": time.time, "perf_counter": time.perf_counter, "monotonic": time.monotonic}
_NANOSECONDS = {
    "time_ns": time.time_ns,
    "perf_counter_ns": time.perf_counter_ns,
    "monotonic_ns": time.monotonic_ns,
}
_REAL = {"sleep": time.sleep}  # in a table, for names of modules are bound anew
_TIMES_CODE = re.compile(r"<timeit-src>|[\\/]torch[\\/]utils[\\/]benchmark[\\/]")
_TORCHS_TIMER = "torch.utils.benchmark.utils.timer"
_origin = lru_cache(maxsize=4096)(origin)

_TOLD = (
    "the program times the card by this machine's clock: seconds and rates that it prints are those of the simulation "
    "here (vramfit run --clock simulated lets Python's clocks follow the card)"
)


def install(mode: OpRunner, clock: ProgramClock, patches: PatchStack) -> None:
    """Let the program read that clock, until the patches are undone."""
    clocks = _Simulated(mode) if clock is ProgramClock.SIMULATED else _Watched(mode)
    pairs: list[tuple[object, object]] = []
    for name, real in {**_SECONDS, **_NANOSECONDS}.items():
        pairs.append((real, _named(name, clocks.reading(real, nanoseconds=name in _NANOSECONDS))))
    if isinstance(clocks, _Simulated):
        pairs.append((_REAL["sleep"], _named("sleep", clocks.sleeping())))
    for _, replaced in pairs:
        patches.set(time, str(getattr(replaced, "__name__", "")), replaced)
    patches.rebind(pairs)
    _replace_defaults({id(real): replaced for real, replaced in pairs}, patches)


def _replace_defaults(table: dict[int, object], patches: PatchStack) -> None:
    """Replace the clock that ``timeit`` and ``torch.utils.benchmark`` keep as a default of their functions."""
    functions: list[Any] = [timeit.timeit, timeit.repeat, timeit.Timer.__init__]
    if (torchs := sys.modules.get(_TORCHS_TIMER)) is not None:
        functions.append(torchs.Timer.__init__)
    for function in functions:
        defaults = function.__defaults__ or ()
        patches.call(partial(setattr, function, "__defaults__", function.__defaults__))
        function.__defaults__ = tuple(table.get(id(one), one) for one in defaults)


def _named(name: str, function: Callable[..., object]) -> Callable[..., object]:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "time"
    return function


class _Watched:
    """The real clocks; says once where the program reads one before and after work of the card."""

    def __init__(self, mode: OpRunner) -> None:
        self._mode = mode
        self._before: int | None = None
        self._told = False

    def reading(self, real: Callable[[], float], *, nanoseconds: bool) -> Callable[[], float]:
        """A function that stands for a clock."""
        del nanoseconds

        def read() -> float:
            if not self._told:
                self._look()
            return real()

        return read

    def _look(self) -> None:
        frame = sys._getframe(2)
        if _origin(frame.f_code.co_filename) is not Origin.USER:
            return
        ops = self._mode.meter.ops
        if self._before is not None and ops > self._before:
            self._told = True
            location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._mode.machine.warn("clock-of-this-machine", _TOLD, location=location)
        self._before = ops


class _Simulated:
    """Clocks that go on with the card."""

    def __init__(self, mode: OpRunner) -> None:
        self._machine = mode.machine
        self._began_us = self._machine.clock_us
        self._spent_us = 0.0  # by reading the clock and by sleeping

    def reading(self, real: Callable[[], float], *, nanoseconds: bool) -> Callable[[], float]:
        """A function that stands for a clock, which goes on from what it says now."""
        began = real()

        def read() -> float:
            if _is_runtime():
                return real()
            self._spent_us += _READING_US
            elapsed = self._machine.clock_us - self._began_us + self._spent_us
            return began + (int(elapsed * 1e3) if nanoseconds else elapsed * 1e-6)

        return read

    def sleeping(self) -> Callable[[float], None]:
        """A function that sleeps for real, while the program's clocks go on."""

        def sleep(seconds: float) -> None:
            if not _is_runtime():
                self._spent_us += seconds * 1e6
            _REAL["sleep"](seconds)

        return sleep


def _is_runtime() -> bool:
    """Whether what reads a clock is neither the program, nor one of its libraries, nor what times code for it."""
    filename = sys._getframe(2).f_code.co_filename
    return _origin(filename) is Origin.RUNTIME and not _TIMES_CODE.search(filename)
