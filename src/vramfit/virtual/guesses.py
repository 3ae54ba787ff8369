"""Answers to questions about values that nobody computed, so that no loop waits forever for another one."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from vramfit.trace.frames import Origin, origin
from vramfit.virtual.machine import Machine

# A loop that has asked this often within one phase, at one place, is waiting for the other answer.
PATIENCE = 200
GUESSED = "the program read values that the virtual GPU does not compute; plausible ones were given"


class Guesses:
    """Gives guessed values to the program, with a warning that names the line that asked."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._asked: Counter[str] = Counter()

    def answer(self, value: Any) -> Any:
        """The guessed value, or its opposite once a call site has asked again and again.

        A ``while mask.any()`` ends only with False, a ``while not done`` only with True: which one a loop needs shows
        when it keeps asking.
        """
        location = self.location()
        self._machine.warn(
            "guessed-value",
            GUESSED,
            location=location,
        )
        self._asked[location] += 1
        if self._asked[location] < PATIENCE:
            return value
        if self._asked[location] == PATIENCE:
            self._machine.warn(
                "guess-flipped",
                f"this line asked {PATIENCE} times in one phase: the answer was turned around to end a loop",
                location=location,
            )
        if isinstance(value, bool):
            return not value
        # A number in a loop's condition: make it grow, so that any bound is passed.
        return value + type(value)(self._asked[location] - PATIENCE + 1)

    def new_phase(self) -> None:
        """Forget who asked: a question per training step is no loop."""
        self._asked.clear()

    def location(self) -> str:
        """``file:line`` of the innermost frame of the program itself."""
        frame: FrameType | None = sys._getframe(1)
        outermost = ""
        while frame is not None:
            name = frame.f_code.co_filename
            outermost = f"{name}:{frame.f_lineno}"
            if origin(name) is Origin.USER:
                return outermost
            frame = frame.f_back
        return outermost
