"""Loops of the program over rows whose number is assumed, and which lines assumed it.

NOTE [Loops over assumed rows]
``for i in range(len(x[mask]))`` goes round as often as the mask selects. Under an upper bound that may be for hours,
though its memory shows in the first rounds. The number cannot be less than the tensor has rows, so the loop itself is
left alone. Where lines in such loops have asked for values `ROUNDS` times, the lines that assumed the number give
`STANDING` rows from then on, for whatever they are asked that is no larger. Masks that were used before keep their
count, so that all that was selected with one has as many rows. What is not shown is held by the error bar.

This is for programs that only look (``torch.no_grad``): where gradients are kept each round may hold more memory, and
the peak comes after the first optimizer step.

Which numbers a loop goes over is read from its source, and what its names stand for from the running frame.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

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
        tree = ast.parse("".join(linecache.getlines(filename)))
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
