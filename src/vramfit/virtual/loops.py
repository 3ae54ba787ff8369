"""Tells from the source of a program whether a line may be what a loop waits for.

Only a ``while``, or a ``for`` over an iterator that never ends, can wait forever for a value. A line inside one may
decide when it ends, unless it is what an ``assert`` or an ``if`` that raises asks.
"""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache

# Iterators that never end, or that ask a function, by the numbers of arguments with which they do.
_ENDLESS = {"count": (0, 1, 2), "cycle": (1,), "repeat": (1,), "iter": (2,)}
_MODULES = {"itertools", "it", "builtins"}


@dataclass(frozen=True, slots=True)
class _Source:
    """First and last lines of a file's loops that may never end, and of its guards."""

    loops: tuple[tuple[int, int], ...]
    guards: tuple[tuple[int, int], ...]


def in_loop(filename: str, line: int) -> bool:
    """Whether a line stands in a loop that may never end; True where the source cannot be read."""
    source = _read(filename)
    return source is None or _within(source.loops, line)


def guards(filename: str, line: int) -> bool:
    """Whether a line is the question of an ``assert`` or of an ``if`` that only raises."""
    source = _read(filename)
    return source is not None and _within(source.guards, line)


def _within(ranges: tuple[tuple[int, int], ...], line: int) -> bool:
    return any(first <= line <= last for first, last in ranges)


def _endless(iterator: ast.expr) -> bool:
    """Whether an expression is a call of an iterator without an end, or of one that asks a function.

    The name of a module may stand before that of the iterator, nothing else: ``x.repeat(4)`` is a tensor.
    """
    if not isinstance(iterator, ast.Call):
        return False
    called = iterator.func
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        name = called.attr if called.value.id in _MODULES else ""
    else:
        name = called.id if isinstance(called, ast.Name) else ""
    return len(iterator.args) + len(iterator.keywords) in _ENDLESS.get(name, ())


@lru_cache(maxsize=1024)
def _read(filename: str) -> _Source | None:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None
    if not tree.body:
        return None
    loops, asked = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.While) or (isinstance(node, ast.For) and _endless(node.iter)):
            loops.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Assert):
            asked.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            asked.append((node.test.lineno, node.test.end_lineno or node.test.lineno))
    return _Source(tuple(loops), tuple(asked))
