"""What depends on a line of a program, read from its source: whether a loop may be waiting for its answer.

NOTE [Loops that wait]
A loop that counts (a ``for`` over something finite, ``while step < steps`` with ``step += 1``, a ``while True`` with
``if step >= steps: break``) ends by itself. Any other may go on until values are as it wants them. Lines that decide
when it ends are its tests (of the ``while``, and of each ``if`` that leaves it), and assignments from which these
tests take what they compare. What an ``assert`` asks, or an ``if`` that raises, decides nothing.

All of this is read from names, so it can be wrong: guesses.py is more patient the less a line looks like a decision.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from vramfit.virtual.source_lines import source_of

# Iterators that never end, or that ask a function, by the numbers of arguments with which they do.
_ENDLESS = {"count": (0, 1, 2), "cycle": (1,), "repeat": (1,), "iter": (2,)}
_MODULES = {"itertools", "it", "builtins"}
_AROUND = {"enumerate", "tqdm"}
_MEASURES = {"len", "time", "perf_counter", "monotonic", "next"}
_SIZES = {"shape", "size", "numel"}
_BELOW, _BEYOND = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
_LEAVES = (ast.Break, ast.Return)
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Loop = ast.While | ast.For | ast.AsyncFor


class Stake(IntEnum):
    """What depends on a line; the higher, the surer it is that a loop waits for it."""

    NONE = 0
    WITHIN_COUNTED = 1
    """The line stands in a ``while`` that counts."""
    ENDS_COUNTED = 2
    """The line may end a loop that would end anyway."""
    WITHIN = 3
    """The line stands in a loop that may wait, or in a source that cannot be read."""
    SETS = 4
    """The line sets what a loop that may wait compares."""
    ENDS = 5
    """The line is a test of a loop that may wait."""


@dataclass(frozen=True, slots=True)
class _LoopSource:
    """First and last lines of a file's loops with what depends on them, and of its guards."""

    stakes: tuple[tuple[Stake, int, int], ...]
    guards: tuple[tuple[int, int], ...]


def stake(filename: str, line: int) -> Stake:
    """What depends on a line."""
    source = _read(filename)
    if source is None:
        return Stake.WITHIN
    return max((kind for kind, first, last in source.stakes if first <= line <= last), default=Stake.NONE)


def guards(filename: str, line: int) -> bool:
    """Whether a line is the question of an ``assert`` or of an ``if`` that only raises."""
    source = _read(filename)
    return source is not None and any(first <= line <= last for first, last in source.guards)


@lru_cache(maxsize=1024)
def _read(filename: str) -> _LoopSource | None:
    try:
        tree = ast.parse(source_of(filename))
    except (SyntaxError, ValueError):
        return None
    if not tree.body:
        return None
    nodes = list(ast.walk(tree))
    loops = [node for node in nodes if isinstance(node, _LOOPS)]
    generators = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any(map(_yields_on, ast.walk(node)))
    }
    asked: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Assert)]
    asked += [
        node.test for node in nodes if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
    ]
    return _LoopSource(
        tuple(found for loop in loops for found in _stakes(loop, generators)), tuple(map(_lines, asked))
    )


def _lines(node: ast.AST) -> tuple[int, int]:
    first: int = node.lineno  # type: ignore[attr-defined]
    return first, getattr(node, "end_lineno", None) or first


def _stakes(loop: _Loop, generators: set[str]) -> Iterator[tuple[Stake, int, int]]:
    exits = list(_exits(loop))
    finite = not isinstance(loop, ast.While) and not _endless(loop.iter, generators)
    counted = finite or _counts(loop, exits)
    if not finite:
        yield Stake.WITHIN_COUNTED if counted else Stake.WITHIN, *_lines(loop)
    for test in exits:
        yield Stake.ENDS_COUNTED if counted else Stake.ENDS, *_lines(test)
    for setting in _settings(loop, exits):
        yield Stake.ENDS_COUNTED if counted else Stake.SETS, *_lines(setting)


# -- where a loop ends -----------------------------------------------------------------------------------------------


def _inside(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes below statements, without the functions that are defined there."""
    for node in statements:
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _inside(ast.iter_child_nodes(node))


def _exits(loop: _Loop) -> Iterator[ast.expr]:
    """The tests that decide whether a loop goes on; that of a ``while`` comes first."""
    flags: set[str] = set()
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        yield loop.test
        flags.update(_names(loop.test))
    breaks = set(_inside(loop.body)) - {
        inner for node in _inside(loop.body) if isinstance(node, _LOOPS) for inner in _inside(node.body)
    }
    for node in _inside(loop.body):
        if isinstance(node, ast.If) and any(
            isinstance(child, ast.Return)
            or (isinstance(child, ast.Break) and child in breaks)
            or (isinstance(child, ast.Assign) and _is_flag(child, flags))
            for child in (*node.body, *node.orelse)
        ):
            yield node.test


def _is_flag(node: ast.Assign, flags: set[str]) -> bool:
    """Whether a statement sets what a ``while`` tests to a constant: ``done = True``."""
    return isinstance(node.value, ast.Constant) and any(
        ast.unparse(target) in flags for target in node.targets
    )


def _settings(loop: _Loop, exits: list[ast.expr]) -> list[ast.AST]:
    """The assignments from which tests take, directly or by way of others, what they compare."""
    assigned = [
        (node, {name for target in _targets(node) for name in _names(target)}, node.value)
        for node in _inside(loop.body)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr))
        and node.value is not None
    ]
    wanted = {name for test in exits for name in _names(test)}
    found: list[ast.AST] = []
    while more := [entry for entry in assigned if entry[0] not in found and entry[1] & wanted]:
        for node, _, value in more:
            found.append(node)
            wanted |= set(_names(value))
    return found


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names(node: ast.AST) -> Iterator[str]:
    """Variables and attributes by their text, without the functions that are called."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id
        yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from _names(node.func.value)
        for child in (*node.args, *node.keywords):
            yield from _names(child)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


# -- whether it ends by itself ---------------------------------------------------------------------------------------


def _counts(loop: _Loop, exits: list[ast.expr]) -> bool:
    """Whether a loop that has no end of its own is left at a count, a time or the end of some data."""
    handlers = (h for node in _inside(loop.body) if isinstance(node, ast.Try) for h in node.handlers)
    if any(isinstance(child, _LEAVES) for handler in handlers for child in handler.body):  # StopIteration
        return True
    counters = set(_counters(loop))
    goes_on = loop.test if isinstance(loop, ast.While) else None
    return any(
        _measured(compare, counters, upwards=_BELOW if test is goes_on else _BEYOND)
        for test in exits
        for compare in _compares(test)
    )


def _compares(test: ast.expr) -> Iterator[ast.Compare]:
    """Comparisons that are the test, or joined to it by ``and``, ``or`` and ``not``."""
    if isinstance(test, ast.Compare):
        yield test
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _compares(part)
    elif isinstance(test, ast.UnaryOp):
        yield from _compares(test.operand)


def _counters(loop: _Loop) -> Iterator[str]:
    """What goes up or down by a count in each round."""
    if not isinstance(loop, ast.While):
        yield from _names(loop.target)
    for node in _inside(loop.body):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, (ast.Add, ast.Sub))
            and _is_count(node.value)
        ):
            yield ast.unparse(node.target)
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and _is_count(node.value.right)
        ):
            yield from (
                text for text in map(ast.unparse, node.targets) if text == ast.unparse(node.value.left)
            )


def _is_count(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return type(value.value) is int
    return isinstance(value, ast.Name) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "len")


def _measured(compare: ast.Compare, counters: set[str], *, upwards: tuple[type[ast.cmpop], ...]) -> bool:
    """Whether a comparison is of a counter, of a time, of data that end, or of a size that grows up to a bound."""
    if isinstance(compare.ops[0], (ast.Is, ast.IsNot)):
        return True
    for side in (compare.left, *compare.comparators):
        if ast.unparse(side) in counters or _calls(side) & _MEASURES - {"len"}:
            return True
    sized = _calls(compare.left) & (_SIZES | {"len"}) or any(
        isinstance(node, ast.Attribute) and node.attr in _SIZES for node in ast.walk(compare.left)
    )
    return bool(sized) and isinstance(compare.ops[0], upwards)


def _calls(node: ast.expr) -> set[str]:
    """The names of what an expression calls."""
    return {
        getattr(call.func, "attr", getattr(call.func, "id", ""))
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    }


def _yields_on(node: ast.AST) -> bool:
    """Whether a node is a loop without an exit that yields: what calls its function may never see the end."""
    return (
        isinstance(node, ast.While)
        and isinstance(node.test, ast.Constant)
        and not any(True for _ in _exits(node))
        and any(isinstance(child, (ast.Yield, ast.YieldFrom)) for child in _inside(node.body))
    )


def _endless(iterator: ast.expr, generators: set[str]) -> bool:
    """Whether an expression is a call of an iterator without an end, or of one that asks a function.

    The name of a module may stand before that of the iterator, nothing else: ``x.repeat(4)`` is a tensor.
    """
    if not isinstance(iterator, ast.Call):
        return False
    called = iterator.func
    name = called.id if isinstance(called, ast.Name) else ""
    if (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id in _MODULES
    ):
        name = called.attr
    if name in _AROUND and iterator.args:
        return _endless(iterator.args[0], generators)
    return name in generators or len(iterator.args) + len(iterator.keywords) in _ENDLESS.get(name, ())
