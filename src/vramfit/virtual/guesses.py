"""Answers to questions about values that nobody computed, so that no loop waits forever for another one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from vramfit.trace import Frame
from vramfit.trace.frames import Origin, origin, user_frame
from vramfit.virtual.loops import guards, in_loop
from vramfit.virtual.machine import Machine

# A loop that has asked this often within one phase, at one place, is waiting for the other answer.
PATIENCE = 200
# A loop that has made this many tensors of a size that depends on data, at one place of its own, is waiting for few.
SIZE_PATIENCE = 1000
# Nobody waits longer than this for a program whose loop no other answer has ended.
LAST = 1_000_000
GUESSED = "the program read values that the virtual GPU does not compute; plausible ones were given"


class Guesses:
    """Gives guessed values to the program, with a warning that names the line that asked."""

    def __init__(self, machine: Machine, backward: Callable[[], tuple[Frame, ...]]) -> None:
        """Takes the machine, and what gives the frames that called the autograd engine, innermost first."""
        self._machine = machine
        self._backward = backward
        self._asked: Counter[tuple[str, str]] = Counter()

    def answer(self, value: Any) -> Any:
        """The guessed value, or another one once a loop has asked again and again.

        A ``while mask.any()`` ends only with False, a ``while not done`` only with True; which number ends a loop is
        not known, so higher, lower and negative ones take turns.

        Raises:
            RuntimeError: no answer has ended the loop.
        """
        location = self.location()
        self._machine.warn("guessed-value", GUESSED, location=location)
        asked = self._count("value", location)
        if asked < PATIENCE or not self._waits(anywhere=True):
            return value
        if asked == PATIENCE:
            self._machine.warn(
                "guess-flipped",
                f"this line asked {PATIENCE} times in one phase: the answer was turned around to end a loop",
                location=location,
            )
        if isinstance(value, bool):
            return not value
        far = asked - PATIENCE + 1
        if isinstance(value, int):  # a token may be waited for, and may be an index
            return (value + far, far // 3, value - far)[far % 3 - 1]
        return (value + far**4, value * 0, value - far**4)[far % 3 - 1]

    def fewer(self, count: int) -> int:
        """How many elements to assume where ``count`` would be usual, fewer once a loop has asked again and again.

        Raises:
            RuntimeError: the loop has not ended with none either.
        """
        location = self.location()
        asked = self._count("size", location)
        if asked < SIZE_PATIENCE or not self._waits(anywhere=False):
            return count
        if asked == SIZE_PATIENCE:
            self._machine.warn(
                "guess-flipped",
                f"this line made {SIZE_PATIENCE:,} tensors of a size that depends on data in one phase: ever fewer "
                "elements are assumed from now on, to end a loop",
                location=location,
            )
        return count >> min(asked - SIZE_PATIENCE + 1, 64)

    def new_phase(self) -> None:
        """Forget who asked: a question per training step is no loop."""
        self._asked.clear()

    def location(self) -> str:
        """``file:line`` of the innermost frame of the program itself.

        In a thread of the autograd engine that is where the backward pass was called; where there is no line of the
        program it is empty.
        """
        frame = next((f for f in _frames() if origin(f.f_code.co_filename) is Origin.USER), None)
        if frame is not None:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        called = user_frame(self._backward())
        if called is not None and origin(called.filename) is Origin.USER:
            return f"{called.filename}:{called.line}"
        frame = next((f for f in _frames() if origin(f.f_code.co_filename) is Origin.LIBRARY), None)
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _count(self, what: str, location: str) -> int:
        self._asked[what, location] += 1
        asked = self._asked[what, location]
        if asked >= LAST and self._waits(anywhere=True):
            raise RuntimeError(
                f"vramfit: {location} asked {LAST:,} times in one phase for what depends on data that the virtual GPU "
                "does not compute, and no answer has ended the loop. Bound the loop for this run"
            )
        return asked

    def _waits(self, *, anywhere: bool) -> bool:
        """Whether a loop may be waiting for the line that asks.

        Args:
            anywhere: a loop of any function that is running counts, not only one around the line itself.
        """
        frames = [f for f in _frames() if origin(f.f_code.co_filename) is not Origin.RUNTIME]
        own = [n for n, f in enumerate(frames) if origin(f.f_code.co_filename) is Origin.USER]
        if own:
            frames = frames[: own[-1] + 1]  # what runs the program (a test runner, a notebook) loops as well
        if not frames or guards(frames[0].f_code.co_filename, frames[0].f_lineno):
            return False
        return any(in_loop(f.f_code.co_filename, f.f_lineno) for f in (frames if anywhere else frames[:1]))


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
