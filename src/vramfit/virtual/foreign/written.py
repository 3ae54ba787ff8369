"""Which of its parameters a Triton kernel may write, read from its source.

A kernel writes through pointers: ``tl.store(pointer, ...)``, ``tl.atomic_add(pointer, ...)``,
``descriptor.store(...)``. A pointer is a parameter, or comes from one by arithmetic and assignments, but not from what
was loaded from it. Helpers that are kernels are read in the same way. A parameter may be taken for written that is
not: its values are unknown then. (Inline assembly and pointers that a kernel loads from memory are not followed.)
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_STORES = ("store", "async_store", "scatter", "store_tensor_descriptor")
_LOADS = ("load", "async_load", "gather", "load_tensor_descriptor", "arange", "program_id", "num_programs")


def written_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a kernel may write: all of them where its source cannot be read.

    Args:
        function: the Python function under ``@triton.jit``.
    """
    return _SourceReader().read(function)


class _SourceReader:
    def __init__(self) -> None:
        self._known: dict[Callable[..., Any], frozenset[str]] = {}

    def read(self, function: Callable[..., Any]) -> frozenset[str]:
        if function not in self._known:
            self._known[function] = (
                frozenset()
            )  # a helper that calls itself adds nothing to its first reading
            self._known[function] = self._read(function)
        return self._known[function]

    def _read(self, function: Callable[..., Any]) -> frozenset[str]:
        parameters = list(inspect.signature(function).parameters)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return frozenset(parameters)
        origins = _origins(tree, parameters)
        written: set[str] = set()
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for pointer in self._pointers(call, function):
                written |= _sources(pointer, origins)
        return frozenset(written & set(parameters))

    def _pointers(self, call: ast.Call, function: Callable[..., Any]) -> Iterator[ast.expr]:
        """The expressions through which a call may write."""
        target = call.func
        if isinstance(target, ast.Attribute) and (
            target.attr in _STORES or target.attr.startswith("atomic_")
        ):
            if isinstance(_value(target.value, function), ModuleType):
                yield from call.args[:1]
                yield from (keyword.value for keyword in call.keywords if keyword.arg in ("pointer", "desc"))
            else:
                yield target.value  # descriptor.store(offsets, value)
            return
        helper = _value(target, function)
        inner = getattr(helper, "fn", None)
        if not inspect.isfunction(inner) or isinstance(helper, type):
            return
        names = list(inspect.signature(inner).parameters)
        writes = self.read(inner)
        yield from (value for name, value in zip(names, call.args, strict=False) if name in writes)
        yield from (keyword.value for keyword in call.keywords if keyword.arg in writes)
        yield from (value for value in call.args if isinstance(value, ast.Starred) and writes)


def _origins(tree: ast.AST, parameters: list[str]) -> dict[str, set[str]]:
    """By name in a kernel: from which parameters it may come."""
    origins = {name: {name} for name in parameters}
    assignments = list(_assignments(tree))
    changed = True
    while changed:
        changed = False
        for targets, value in assignments:
            sources = _sources(value, origins)
            for name in targets:
                if not sources <= origins.setdefault(name, set()):
                    origins[name] |= sources
                    changed = True
    return origins


def _assignments(tree: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield [name for target in node.targets for name in _names(target)], node.value
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield _names(node.target), node.value
        elif isinstance(node, ast.For):
            yield _names(node.target), node.iter


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    """The names of the module in which a function was written."""
    found: dict[str, Any] = getattr(function, "__globals__", {})
    return found


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _sources(value: ast.expr, origins: dict[str, set[str]]) -> set[str]:
    """Parameters from which an expression may come; what is loaded is data, no pointer."""
    found: set[str] = set()
    waiting: list[ast.AST] = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS:
            continue
        if isinstance(node, ast.Name):
            found |= origins.get(node.id, set())
        waiting += ast.iter_child_nodes(node)
    return found


def _value(node: ast.expr, function: Callable[..., Any]) -> Any:
    """What a name or a dotted name of a kernel's source stands for outside it; None for a local one."""
    if isinstance(node, ast.Name):
        local = inspect.getclosurevars(function).nonlocals
        return local.get(node.id, _globals(function).get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, function), node.attr, None)
    return None
