"""Tells from the source of a program what must not be answered at random: what an ``assert`` or a ``raise`` hangs on.

A guess never makes a program fail: where the source says which answer raises, the other one is given, and such a line
is never suspected of waiting (guesses.py). What is read are ``assert``, an ``if`` that raises on either side, an ``if``
that returns before a ``raise`` ends the block, and calls such as ``torch._assert(x.all(), ...)`` and ``torch._check``.

The test of a ``while`` that asks ``any`` or ``all`` is read here as well: the answer that ends it comes first. So does
the one that leaves a ``while True`` because nothing is left to do, ``if not rejected.any(): break``: that is how
torch.nn.init.trunc_normal_ draws. A ``break`` when something has come (``if (token == eos).any()``) is not taken so.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

_CHECKS = ("_check", "_assert", "assert")
_NEGATED = {"assertFalse"}
_REDUCTIONS = {"any", "all"}
_BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True, slots=True)
class Guard:
    """A question of which the source says what should be answered.

    Attributes:
        first, last: its lines.
        wanted: the truth value that lets the program go on; None where several questions of a line want different
            ones, and which is asked is not known.
        raises: the other one makes it fail; otherwise it makes it go round again.
    """

    first: int
    last: int
    wanted: bool | None
    raises: bool


def guard(filename: str, line: int, which: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> Guard | None:
    """What hangs on a question of a line; None where nothing is known.

    Args:
        filename: of the source.
        line: the line that asks.
        which: gives the number of the question on its line, and how many there are; asked where they want different
            answers.
    """
    found = [g for g in _read(filename) if g.first <= line <= g.last]
    if not found:
        return None
    nearest = min(g.last - g.first for g in found)
    found = [g for g in found if g.last - g.first == nearest]
    found = [g for g in found if g.raises] or found
    if len({g.wanted for g in found}) > 1:
        number, of = which()
        found = [found[number]] if of == len(found) and number < of else found
    return found[0] if len({g.wanted for g in found}) == 1 else replace(found[0], wanted=None)


@lru_cache(maxsize=1024)
def _read(filename: str) -> tuple[Guard, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(found for node in ast.walk(tree) for found in _guards(node))


def _guards(node: ast.AST) -> Iterator[Guard]:
    if isinstance(node, ast.Assert):
        yield from _questions(node.test, True)
    elif isinstance(node, ast.If):
        if _raises(node.body):
            yield from _questions(node.test, False)
        elif _raises(node.orelse):
            yield from _questions(node.test, True)
    elif isinstance(node, ast.Call) and node.args and _name(node.func).startswith(_CHECKS):
        yield from _questions(node.args[0], _name(node.func) not in _NEGATED)
    elif isinstance(node, ast.While):
        yield from (replace(found, raises=False) for found in _questions(node.test, False, only=_REDUCTIONS))
        yield from _nothing_left(node)
    for block in (getattr(node, name, None) for name in _BLOCKS):
        if isinstance(block, list) and len(block) > 1 and isinstance(block[-1], ast.Raise):
            for step in block[:-1]:
                if isinstance(step, ast.If) and isinstance(step.body[-1], ast.Return):
                    yield from _questions(step.test, True)


def _nothing_left(loop: ast.While) -> Iterator[Guard]:
    """The questions of a ``while True`` that leave it when there is not ``any``."""
    if not isinstance(loop.test, ast.Constant):
        return
    for step in loop.body:
        if isinstance(step, ast.If) and isinstance(step.body[-1], ast.Break):
            for found in _questions(step.test, True, only={"any"}):
                if found.wanted is False:
                    yield replace(found, raises=False)


def _raises(block: list[ast.stmt]) -> bool:
    """Whether a block ends in a ``raise``, in each of its branches where it ends in an ``if``."""
    if not block:
        return False
    last = block[-1]
    return isinstance(last, ast.Raise) or (
        isinstance(last, ast.If) and _raises(last.body) and (not last.orelse or _raises(last.orelse))
    )


def _questions(test: ast.expr, wanted: bool, only: set[str] | None = None) -> Iterator[Guard]:
    """The parts of a test that are asked for their truth; ``only`` says which calls count."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _questions(test.operand, not wanted, only)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _questions(part, wanted, only)
    elif isinstance(test, ast.NamedExpr):
        yield from _questions(test.value, wanted, only)
    elif only is None or (isinstance(test, ast.Call) and _name(test.func) in only):
        yield _asked(test, wanted)


def _asked(test: ast.expr, wanted: bool) -> Guard:
    last = test.end_lineno or test.lineno
    # Compared with True or False, it is not clear what is asked.
    sides = test.comparators if isinstance(test, ast.Compare) else []
    clear = not any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in sides)
    return Guard(test.lineno, last, wanted if clear else None, raises=True)


def _name(called: ast.expr) -> str:
    """The name of what is called, without where it stands."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
