"""A notebook's cell as a program of its own: the cell behind what earlier cells bind of the names that it uses.

Of earlier cells it takes whole statements that bind a needed name (imports, functions, classes, assignments and what
has such inside), the names that these use in turn, and nothing else: what a cell only calls is not run again.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vramfit.trace.tried_remedies import TriedRemedies

FILE = "cell.py"
"""What the program's file is called."""

_GIVEN = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellProgram:
    """A cell as a program.

    Attributes:
        source: its text.
        places: for each line of it, the number of the cell and the line there; None where no cell has it.
        missing: names that the cell uses and no cell binds.
    """

    source: str
    places: tuple[tuple[int, int] | None, ...]
    missing: tuple[str, ...]

    def told(self, tried: TriedRemedies) -> TriedRemedies:
        """Remedies with the places of cells for those of the program."""
        rows = tuple(replace(row, how=tuple(map(self._told, row.how))) for row in tried.rows)
        return replace(tried, rows=rows)

    def _told(self, words: str) -> str:
        return re.sub(rf"\b{re.escape(FILE)}:(\d+)(?:-(\d+))?", self._place, words)

    def _place(self, found: re.Match[str]) -> str:
        first, last = found.groups()
        place = self.places[int(first) - 1]
        if place is None:
            return found.group()
        until = f"-{place[1] + int(last) - int(first)}" if last else ""
        return f"In [{place[0]}]:{place[1]}{until}"


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a cell, with the names that it binds and uses."""

    cell: int
    first: int
    lines: tuple[str, ...]
    binds: frozenset[str]
    uses: frozenset[str]


def cell_program(
    earlier: Sequence[tuple[int, str]], number: int, cell: str, *, before: str = ""
) -> CellProgram:
    """A cell as a program.

    Args:
        earlier: number and text of each cell that ran before, in their order; what does not parse is left out.
        number: of the cell.
        cell: its text.
        before: a line that comes first.

    Raises:
        SyntaxError: the cell does not parse.
    """
    own = list(_statements(number, cell))
    needed = set().union(*(statement.uses for statement in own)) - _GIVEN
    taken: list[_Statement] = []
    for statement in reversed([one for at, text in earlier for one in _parsed(at, text)]):
        if not needed.isdisjoint(statement.binds):
            taken.append(statement)
            needed |= statement.uses - _GIVEN
    bound = set().union(*(statement.binds for statement in (*own, *taken)))
    lines, places = ([before], [None]) if before else ([], [])
    found: list[tuple[int, int] | None] = list(places)
    for statement in reversed(taken):
        lines += statement.lines
        found += [(statement.cell, statement.first + count) for count in range(len(statement.lines))]
    text = cell.split("\n")
    lines += text
    found += [(number, line) for line in range(1, len(text) + 1)]
    return CellProgram(
        source="\n".join(lines) + "\n", places=tuple(found), missing=tuple(sorted(needed - bound))
    )


def _parsed(number: int, text: str) -> Iterator[_Statement]:
    try:
        yield from _statements(number, text)
    except SyntaxError:  # a cell of another magic, or one that failed
        return


def _statements(number: int, text: str) -> Iterator[_Statement]:
    lines = text.split("\n")
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", ())
        first = min((node.lineno, *(one.lineno for one in decorators)))
        last = node.end_lineno or node.lineno
        yield _Statement(
            number, first, tuple(lines[first - 1 : last]), frozenset(_binds(node)), frozenset(_uses(node))
        )


def _binds(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds outside of functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name


def _uses(node: ast.stmt) -> Iterator[str]:
    """The names that a statement reads, but for those that its own functions bind for themselves."""
    local = {
        name
        for inner in ast.walk(node)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension)
        for name in _own_names(inner)
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load) and inner.id not in local:
            yield inner.id
        elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id


def _own_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.comprehension):
        yield from (one.id for one in ast.walk(node.target) if isinstance(one, ast.Name))
        return
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    yield from (one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg))
    if not isinstance(node, ast.Lambda):
        yield from (
            one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        )
