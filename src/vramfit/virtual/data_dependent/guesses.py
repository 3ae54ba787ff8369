"""Answers to questions about values that nobody computed, given so that no loop waits forever for another answer.

NOTE [Loops over assumed rows]
``for i in range(len(x[mask]))`` goes round as often as the mask selects. Under an upper bound that may be for hours,
though its memory shows in the first rounds. The number cannot be less than the tensor has rows, so the loop itself is
left alone. Where lines in such loops have asked for values `ROUNDS` times, the lines that assumed the number give
`STANDING` rows from then on, wherever the usual number is no larger. Masks that were used before keep their
count, so that all that was selected with one has as many rows. What is not shown is held by the error bar.

This is for programs that only look (``torch.no_grad``): where gradients are kept each round may hold more memory, and
the peak comes after the first optimizer step.

Which numbers a loop goes over is read from its source, and what its names stand for from the running frame.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import torch

from vramfit.options.assume_choice import Assume
from vramfit.trace import Frame
from vramfit.trace.frames import Origin, origin, user_frame
from vramfit.virtual.data_dependent.loops import Stake, guards, stake
from vramfit.virtual.guards import Guard, guard
from vramfit.virtual.machine import Machine
from vramfit.virtual.source_lines import source_of

# -- loops over rows whose number is assumed, and the lines that assumed it ----------------------------------


ROUNDS = 128
"""Questions of one line after which a loop over assumed rows has shown what it needs."""
STANDING = 2
"""Rows that stand for all others from then on."""
_LEAST = 32  # numbers below are too often equal by chance, and such loops end soon


class AssumedRows:
    """Where numbers of rows are assumed, and which of these lines give few of them by now."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, set[str]] = defaultdict(set)
        self._longest: Counter[str] = Counter()  # rows over which a loop went, by the line that assumed them

    def assume(self, count: int, location: str) -> None:
        """A line assumed a number of rows."""
        if count >= _LEAST:
            self._lines[count].add(location)

    def shown(self, count: int, location: str) -> int:
        """How many rows a line gives where ``count`` would be usual."""
        return min(count, STANDING) if count <= self._longest[location] else count

    def end(self, frames: Iterable[FrameType]) -> list[str]:
        """Let loops over assumed rows that are running go over few of them in future.

        Args:
            frames: of the program, innermost first.

        Returns:
            The lines that give fewer from now on.
        """
        found = []
        for number in sorted({n for frame in frames for n in _looped(frame)} & self._lines.keys()):
            for location in sorted(self._lines[number]):
                if number > self._longest[location]:
                    self._longest[location] = number
                    found.append(location)
        return found


def _looped(frame: FrameType) -> Iterator[int]:
    """The lengths and numbers over which the loops go that a frame is in."""
    for first, last, names in _read(frame.f_code.co_filename):
        if first <= frame.f_lineno <= last:
            for name in names:
                yield from _numbers(frame.f_locals.get(name))


def _numbers(value: Any) -> Iterable[int]:
    if type(value) is int:
        return (value,)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (list, tuple)) else ()


@lru_cache(maxsize=1024)
def _read(filename: str) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """First and last lines of the body of each ``for`` loop, and the variables from which it takes its rows."""
    try:
        tree = ast.parse(source_of(filename))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        (loop.body[0].lineno, loop.end_lineno or loop.lineno, tuple(_variables(loop.iter)))
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For)
    )


def _variables(iterator: ast.expr) -> Iterator[str]:
    for node in ast.walk(iterator):
        if isinstance(node, ast.Name):
            yield node.id


# A line that ends a loop, and has asked this often in all, waits for the other answer; so does one within such a loop
# that has asked as often within one phase.
PATIENCE = 200
# The program's own code in such a loop, or what a test of the loop calls: more may be hidden there, such as a limit.
INDIRECT_PATIENCE = 2_000
# Loops that count end by themselves, but the count may be higher than anybody waits for, or never go on.
COUNTED_PATIENCE = 10_000
# Loops of libraries that generate text bound it in ways that their source does not show at once.
LIBRARY_PATIENCE = 100_000
# A loop that has made this many tensors of a size that depends on data, at one place of its own, is waiting for few:
# within one phase, or in all.
SIZE_PATIENCE = 1_000
SIZE_PATIENCE_IN_ALL = 20_000
# Nobody waits longer than this for a program whose loop no other answer has ended.
LAST = 1_000_000
_OWN = str(Path(__file__).resolve().parents[2])
GUESSED = "the program read values that the virtual GPU does not compute; plausible ones were given"


class Guesses:
    """Gives guessed values to the program, with a warning that names the line that asked."""

    def __init__(self, machine: Machine, backward: Callable[[], tuple[Frame, ...]]) -> None:
        """Takes the machine, and what gives the frames that called the autograd engine, innermost first."""
        self._machine = machine
        self._backward = backward
        self._asked: Counter[tuple[str, str]] = Counter()  # in this phase
        self._ever: Counter[tuple[str, str]] = Counter()
        self._turned: Counter[str] = Counter()
        self.rows = AssumedRows()

    def answer(self, value: Any) -> Any:
        """The guessed value, or another one once a loop has asked again and again (NOTE [Loops that wait] in loops.py).

        A ``while mask.any()`` ends only with False, a ``while not done`` only with True; which number ends a loop is
        not known, so higher, lower and negative ones take turns. They do so without a pattern, for a loop may ask
        several questions in turn. An answer that would make the program fail is not given (guards.py).

        Raises:
            RuntimeError: no answer has ended the loop.
        """
        location = self.location()
        self._machine.warn("guessed-value", GUESSED, location=location)
        asked, ever = self._count("value", location)
        guarding = _guarding()
        guarded = guarding is not None and guarding.raises
        if guarding is not None and guarded and guarding.wanted is not None and isinstance(value, bool):
            value = guarding.wanted
        if ever < PATIENCE or guarded or not self._waits(asked, ever):
            return value
        far = self._turn(location)
        if far == 1:
            self._machine.warn(
                "guess-flipped",
                f"this line asked {ever:,} times: the answer was turned around to end a loop",
                location=location,
            )
        turn = crc32(far.to_bytes(4, "little"))
        if isinstance(value, bool):
            return value if far > 1 and turn % 2 else not value
        if isinstance(value, int):  # a token may be waited for, and may be an index
            return (value + far, far // 3, value - far)[turn % 3]
        return (value + far**4, value * 0, value - far**4)[turn % 3]

    def ends_loop(self) -> bool | None:
        """What ends the ``while`` whose test asks for any or all of something; None where none does."""
        found = _guarding()
        return None if found is None or found.raises else found.wanted

    def fewer(self, count: int, *, settled: bool = False) -> int:
        """How many elements to assume where ``count`` would be usual, fewer once a loop has asked again and again.

        Args:
            count: the usual number.
            settled: it was given before, so it stays.

        Raises:
            RuntimeError: the loop has not ended with none either.
        """
        location = self.location()
        asked, ever = self._count("size", location)
        if settled:
            return count
        if not torch.is_grad_enabled():
            count = self.rows.shown(count, location)
        if ever < SIZE_PATIENCE or (asked < SIZE_PATIENCE and ever < SIZE_PATIENCE_IN_ALL):
            return count
        frames = self._frames()
        if not frames or _stake(frames[0]) < (Stake.WITHIN if asked >= SIZE_PATIENCE else Stake.SETS):
            return count
        far = self._turn(location)
        if far == 1:
            self._machine.warn(
                "guess-flipped",
                f"this line made {ever:,} tensors of a size that depends on data: ever fewer elements are assumed "
                "from now on, to end a loop",
                location=location,
            )
        return count >> far % 64

    def new_phase(self) -> None:
        """Forget which lines asked: a question per training step is no loop."""
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

    def _count(self, what: str, location: str) -> tuple[int, int]:
        """How often a place has asked in this phase, and in all."""
        self._asked[what, location] += 1
        self._ever[what, location] += 1
        ever = self._ever[what, location]
        looks = self._machine.assume is Assume.UPPER and not torch.is_grad_enabled()
        if ever % ROUNDS == 0 and looks:
            for line in self.rows.end(self._frames()):
                self._machine.warn(
                    "rows-shortened",
                    f"a loop over rows whose number this line assumes asked {ever:,} times: {STANDING} rows stand for "
                    "all from now on, and the error bar holds the others",
                    location=line,
                )
        return self._asked[what, location], ever

    def _turn(self, location: str) -> int:
        """How many answers of a place have been turned around."""
        self._turned[location] += 1
        if self._turned[location] >= LAST:
            raise RuntimeError(
                f"vramfit: {location} got {LAST:,} other answers about what depends on data that the virtual GPU does "
                "not compute, and none has ended the loop. Bound the loop for this run"
            )
        return self._turned[location]

    def _frames(self) -> list[FrameType]:
        """The frames of the program and its libraries, innermost first."""
        frames = [f for f in _frames() if origin(f.f_code.co_filename) is not Origin.RUNTIME]
        own = [n for n, f in enumerate(frames) if origin(f.f_code.co_filename) is Origin.USER]
        # What runs the program (a test runner, a notebook) loops as well.
        return frames[: own[-1] + 1] if own else frames

    def _waits(self, asked: int, ever: int) -> bool:
        """Whether a loop seems to wait for a line that asked so often in this phase, and ``ever`` times in all."""
        frames = self._frames()
        if not frames or guards(frames[0].f_code.co_filename, frames[0].f_lineno):
            return False
        own = origin(frames[0].f_code.co_filename) is Origin.USER
        stakes = [_stake(frame) for frame in frames]
        for number, (frame, found) in enumerate(zip(frames, stakes, strict=True)):
            patience = _patience(found, direct=number == 0, own=own)
            at_once = asked >= PATIENCE and patience <= INDIRECT_PATIENCE
            if origin(frame.f_code.co_filename) is Origin.LIBRARY:
                patience = max(patience, LIBRARY_PATIENCE)
            if at_once or ever >= patience:
                return True
        return False


def _stake(frame: FrameType) -> Stake:
    return stake(frame.f_code.co_filename, frame.f_lineno)


def _patience(found: Stake, *, direct: bool, own: bool) -> int:
    """How many questions are answered alike.

    Args:
        found: what hangs on a line that is running.
        direct: the line itself asks, rather than a function that it calls.
        own: the program's own code asks.
    """
    if found is Stake.ENDS or (direct and found is Stake.SETS):
        return PATIENCE if direct else INDIRECT_PATIENCE
    if own and found >= Stake.WITHIN:
        return INDIRECT_PATIENCE
    if found is Stake.ENDS_COUNTED or (own and found is Stake.WITHIN_COUNTED):
        return COUNTED_PATIENCE
    return LAST


def _guarding() -> Guard | None:
    """What depends on the current question of torch itself, or of the innermost frame outside of torch."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith(_OWN):
            continue
        if (found := guard(frame)) is not None:
            return found
        if origin(name) is not Origin.RUNTIME:
            return None
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
