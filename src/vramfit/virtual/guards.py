"""Reads from a program's source which answers must not be guessed: those on which an ``assert`` or a ``raise`` depends.

A guess never makes a program fail: where the source says which answer raises, the other one is given, and such a
question is never suspected of waiting (guesses.py). This module reads ``assert``, an ``if`` that raises on either side,
an ``if`` that returns before a ``raise`` ends the block, and calls such as ``torch._assert(x.all(), ...)`` and
``torch._check``.

Questions on one line are distinguished by what the frame is evaluating: a part of the test on which a jump depends, or
an expression in it. How a ``not``, ``any(... for)``, ``.item() == 0`` or ``is False`` around a question changes its
answer is known. For other expressions in such a test it is not known, so no answer is preferred.

The test of a ``while`` that asks ``any`` or ``all`` is read here as well: the answer that ends the loop comes first. So
does the one that leaves a ``while True`` because nothing is left to do, ``if not rejected.any(): break``, which is how
torch.nn.init.trunc_normal_ draws. A ``break`` when something has come (``if (token == eos).any()``) is not read so.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from dis import get_instructions, opname
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from vramfit.virtual.source_lines import source_of

_CHECKS = ("_check", "_assert", "assert")
_NEGATED = {"assertFalse"}
_REDUCTIONS = {"any", "all"}
_BLOCKS = ("body", "orelse", "finalbody")
_FAR = 1 << 30
_HOW: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}

Place = tuple[int, int, int, int]
"""Where an expression lies: first line and column, last line and column."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A question for which the source says what should be answered.

    Attributes:
        wanted: the truth value that lets the program go on; None where that is not known.
        raises: the other value makes the program fail; otherwise it makes the program go round a loop again.
    """

    wanted: bool | None
    raises: bool


@dataclass(frozen=True, slots=True)
class _Test:
    """An expression, the truth value that it should have, and whether the program fails where it has the other one."""

    asked: ast.expr
    wanted: bool
    statement: ast.stmt | None = None  # whose jumps ask for the parts of the test
    raises: bool = True
    only: frozenset[str] | None = None  # calls of these names alone count


@dataclass(frozen=True, slots=True)
class _Header:
    """The lines of a statement up to the end of its test, and what each jump there asks, in order."""

    first: int
    last: int
    parts: tuple[Guard, ...]
    plain: bool  # there are no other jumps


@dataclass(frozen=True, slots=True)
class _GuardedSource:
    questions: dict[Place, Guard]
    headers: tuple[_Header, ...]
    tests: tuple[Place, ...]  # whose outcome may make the program fail


def guard(frame: FrameType) -> Guard | None:
    """What depends on the question that a frame asks; None where nothing is known."""
    source = _read(frame.f_code.co_filename)
    if not (source.questions or source.tests):
        return None
    if _jumps(frame.f_code, frame.f_lasti):
        return _of_jump(source, frame)
    place = _evaluated(frame)
    if (found := source.questions.get(place)) is not None:
        return found
    within = any(test[:2] <= place[:2] and place[2:] <= test[2:] for test in source.tests)
    return Guard(None, raises=True) if within else None


def _of_jump(source: _GuardedSource, frame: FrameType) -> Guard | None:
    """What depends on the question of a jump. Python 3.11 says where a jump lies by the line alone."""
    line = frame.f_lineno
    headers = [header for header in source.headers if header.first <= line <= header.last]
    if not headers:
        return None
    nearest = min(header.last - header.first for header in headers)
    headers = [header for header in headers if header.last - header.first == nearest]
    parts = [part for header in headers for part in header.parts]
    if all(header.plain for header in headers):
        if len({part.wanted for part in parts}) == 1:
            return parts[0]
        number, count = _count(frame.f_code, frame.f_lasti, headers[0].first, headers[0].last)
        if count % len(parts) == 0:  # Python compiles the body of a ``finally`` more than once
            return parts[number % len(parts)]
    return Guard(None, raises=True)


def _jumps(code: CodeType, at: int) -> bool:
    """Whether a conditional jump asks the question."""
    names = (opname[code.co_code[offset]] for offset in range(at, len(code.co_code), 2))
    name = next(names)
    if name == "TO_BOOL":  # Python 3.13 asks beforehand
        name = next(name for name in names if name != "CACHE")
    return "JUMP" in name and "_IF_" in name


@lru_cache(maxsize=1024)
def _count(code: CodeType, at: int, first: int, last: int) -> tuple[int, int]:
    """The position of a conditional jump among those of some lines, and their number."""
    jumps = [
        instruction.offset
        for instruction in get_instructions(code)
        if instruction.positions is not None
        and first <= (instruction.positions.lineno or 0) <= last
        and "JUMP" in instruction.opname
        and "_IF_" in instruction.opname
    ]
    return sum(offset < at for offset in jumps), len(jumps)


def _evaluated(frame: FrameType) -> Place:
    """Where the expression lies that a frame is evaluating."""
    code, nowhere = frame.f_code, (None, None, None, None)
    line, last, column, last_column = next(islice(code.co_positions(), frame.f_lasti // 2, None), nowhere)
    if line is None or last is None or column is None or last_column is None:
        return frame.f_lineno, _FAR, frame.f_lineno, -1  # compiled without: within every test of the line
    return line, column, last, last_column


@lru_cache(maxsize=1024)
def _read(filename: str) -> _GuardedSource:
    try:
        tree = ast.parse(source_of(filename))
    except (SyntaxError, ValueError):
        return _GuardedSource({}, (), ())
    questions: dict[Place, Guard] = {}
    tests = [test for node in ast.walk(tree) for test in _tests(node)]
    for test in tests:
        for asked, wanted in _questions(test.asked, test.wanted):
            if test.only is None or (isinstance(asked, ast.Call) and _name(asked.func) in test.only):
                place = _place(asked)
                questions[place] = _agreed(questions.get(place), Guard(wanted, test.raises))
    headers = sorted(_headers(tests), key=lambda header: header.first)
    return _GuardedSource(
        questions, tuple(headers), tuple(_place(test.asked) for test in tests if test.raises)
    )


def _headers(tests: list[_Test]) -> Iterator[_Header]:
    for test in tests:
        if test.statement is not None:
            parts = list(_parts(test.asked, test.wanted))
            guards = tuple(
                Guard(wanted, test.raises) for part, wanted in parts for _ in range(_jumps_of(part))
            )
            inside = (
                node for part, _ in parts for top in ast.iter_child_nodes(part) for node in ast.walk(top)
            )
            plain = not any(isinstance(node, (ast.BoolOp, ast.IfExp)) for node in inside)
            if guards:
                last = test.asked.end_lineno or test.asked.lineno
                yield _Header(test.statement.lineno, last, guards, plain)


def _jumps_of(part: ast.expr) -> int:
    """The number of jumps that a part of a test compiles to."""
    if isinstance(part, ast.Compare):
        return len(part.ops)
    return 0 if isinstance(part, ast.Constant) else 1


def _agreed(known: Guard | None, found: Guard) -> Guard:
    """The guard of an expression that has two: one that raises goes before one that goes round again."""
    if known is None or known.raises != found.raises:
        return found if known is None or found.raises else known
    return known if known.wanted == found.wanted else replace(known, wanted=None)


def _place(node: ast.expr) -> Place:
    last, column = node.end_lineno, node.end_col_offset
    return node.lineno, node.col_offset, last or node.lineno, column or node.col_offset


def _tests(node: ast.AST) -> Iterator[_Test]:
    """The tests that a statement or a call makes."""
    if isinstance(node, ast.Assert):
        yield _Test(node.test, True, node)
    elif isinstance(node, ast.If):
        if _raises(node.body):
            yield _Test(node.test, False, node)
        elif _raises(node.orelse):
            yield _Test(node.test, True, node)
    elif isinstance(node, ast.Call) and node.args and _name(node.func).startswith(_CHECKS):
        wanted = _name(node.func) not in _NEGATED
        yield _Test(node, wanted)  # what is called asks
        yield _Test(node.args[0], wanted)
    elif isinstance(node, ast.While):
        yield _Test(node.test, False, raises=False, only=frozenset(_REDUCTIONS))
        yield from _nothing_left(node)
    for block in (getattr(node, name, None) for name in _BLOCKS):
        if isinstance(block, list) and len(block) > 1 and isinstance(block[-1], ast.Raise):
            for step in block[:-1]:
                if isinstance(step, ast.If) and isinstance(step.body[-1], ast.Return):
                    yield _Test(step.test, True, step)


def _nothing_left(loop: ast.While) -> Iterator[_Test]:
    """The tests of a ``while True`` that leave the loop when ``any`` is false."""
    if not isinstance(loop.test, ast.Constant):
        return
    for step in loop.body:
        if isinstance(step, ast.If) and isinstance(step.body[-1], ast.Break):
            for asked, wanted in _questions(step.test, True):
                if wanted is False and isinstance(asked, ast.Call):
                    yield _Test(asked, False, raises=False, only=frozenset({"any"}))


def _raises(block: list[ast.stmt]) -> bool:
    """Whether a block ends in a ``raise``, so that nothing is lost by keeping out of it.

    A block that ends in an ``if`` counts where each branch does, or where the ``if`` is all that the block holds.
    """
    if not block:
        return False
    last = block[-1]
    if not isinstance(last, ast.If):
        return isinstance(last, ast.Raise)
    return _raises(last.body) and (_raises(last.orelse) if last.orelse else len(block) == 1)


def _parts(test: ast.expr, wanted: bool | None) -> Iterator[tuple[ast.expr, bool | None]]:
    """The parts of a statement's test on which jumps depend, in order, and what each should answer."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, None if wanted is None else not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part, wanted)
    elif isinstance(test, ast.IfExp):
        yield from _parts(test.test, None)
        for part in (test.body, test.orelse):
            yield from _parts(part, wanted)
    else:
        yield test, wanted


def _questions(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions of a test whose truth may be asked, with the answer that makes the whole come out as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield test, not wanted  # the ``not`` asks, where more than a jump hangs on it
        yield from _questions(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        yield test, wanted
        for part in test.values:
            yield from _questions(part, wanted)
    elif isinstance(test, ast.IfExp):
        for part in (test.body, test.orelse):
            yield from _questions(part, wanted)
    else:
        yield test, wanted
        if isinstance(test, ast.NamedExpr):
            yield from _questions(test.value, wanted)
        elif isinstance(test, ast.Compare):
            yield from _compared(test, wanted)
        elif isinstance(test, ast.Call):
            yield from _called(test, wanted)


def _compared(test: ast.Compare, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The left side of a comparison with a constant, where the result tells True from False."""
    how, other = _HOW.get(type(test.ops[0])), test.comparators[0]
    if how is None or len(test.ops) > 1 or not isinstance(other, ast.Constant):
        return
    if not isinstance(other.value, (bool, int, float)):
        return
    yes = bool(how(True, other.value))
    if yes != bool(how(False, other.value)):
        yield from _questions(test.left, yes == wanted)


def _called(test: ast.Call, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions whose truth ``bool(x)``, ``x.item()``, ``any(x for ...)`` and ``all([x, y])`` ask for."""
    name = _name(test.func)
    if isinstance(test.func, ast.Attribute):
        if name == "item" and not test.args:
            yield from _questions(test.func.value, wanted)
    elif len(test.args) == 1:
        (given,) = test.args
        if name in ("bool", "int"):
            yield from _questions(given, wanted)
        elif name in _REDUCTIONS and isinstance(given, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            yield from _questions(given.elt, wanted)
        elif name in _REDUCTIONS and isinstance(given, (ast.List, ast.Tuple, ast.Set)):
            for part in given.elts:
                yield from _questions(part, wanted)


def _name(called: ast.expr) -> str:
    """The last name of what is called, without the module or object that holds it."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
