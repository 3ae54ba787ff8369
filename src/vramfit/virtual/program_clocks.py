"""The clocks that a program reads: this machine's, with a warning where it times the card by them, or the card's.

NOTE [Clocks of programs]
A program times its steps by Python's clocks, and prints tokens a second. On a virtual card these say how quickly this
machine follows the program. `ProgramClock.SIMULATED` lets the clocks that the program and its libraries read go on with
the card instead: what was queued counts as done, as after ``torch.cuda.synchronize()``. The standard library, torch and
vramfit wait and poll by the real clocks in any case. A reading takes `_READING_US`, so that a program which waits for a
moment gets there; sleeping is real, and counts too.

`datetime` reads the system's clock in C and stays real; so do clocks that were kept where no name of a module leads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import Enum
from functools import lru_cache

from vramfit.errors import UsageError
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
_origin = lru_cache(maxsize=4096)(origin)

_TOLD = (
    "the program times the card by this machine's clock: seconds and rates that it prints are those of the simulation "
    "here (vramfit run --clock simulated lets Python's clocks follow the card)"
)


class ProgramClock(Enum):
    """What the clocks follow that a program reads."""

    REAL = "real"
    SIMULATED = "simulated"


def program_clock(given: str | ProgramClock) -> ProgramClock:
    """The clock of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return ProgramClock(given)
    except ValueError:
        names = " or ".join(one.value for one in ProgramClock)
        raise UsageError(f"clock={given!r} is no clock", f"Use {names}") from None


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
    """Whether what reads a clock is neither the program nor a library of its."""
    return _origin(sys._getframe(2).f_code.co_filename) is Origin.RUNTIME
