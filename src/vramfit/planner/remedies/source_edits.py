"""Edits of a program's source that a person would make, and the program with them, without touching a file.

An edit replaces whole lines. Several of one file are applied from its end, so that each is told by the line numbers of
the file as it is.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vramfit.trace import Frame


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEdit:
    """Lines in place of others.

    Attributes:
        file: which file.
        first: the first line that goes, from 1.
        last: the last one; one less than `first` where lines are only inserted.
        lines: what stands there then, without line ends.
        words: the edit as a person is told it.
    """

    file: str
    first: int
    last: int
    lines: tuple[str, ...]
    words: str


def edited(edits: Iterable[SourceEdit]) -> dict[str, bytes]:
    """The text of each file with its edits, by its absolute path.

    Raises:
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[SourceEdit]] = {}
    for edit in edits:
        by_file.setdefault(os.path.abspath(edit.file), []).append(edit)
    return {file: _applied(file, found) for file, found in by_file.items()}


def _applied(file: str, edits: Sequence[SourceEdit]) -> bytes:
    lines = _lines(file)
    for edit in sorted(edits, key=lambda one: (one.first, one.last), reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return ("\n".join(lines) + "\n").encode()


def inserted_before(at: Frame, new: Sequence[str], root: Path) -> SourceEdit | None:
    """New lines before the statement at a line, at its indentation; None where there is no such statement."""
    found = _statement(at)
    if found is None:
        return None
    statement, _ = found
    indent = " " * statement.col_offset
    place = _place(at.filename, statement.lineno, root)
    shown = "; ".join(new)
    return SourceEdit(
        file=at.filename,
        first=statement.lineno,
        last=statement.lineno - 1,
        lines=tuple(f"{indent}{line}" for line in new),
        words=f"before {place} insert  {shown}",
    )


def wrapped(first: Frame, until: Frame, header: str, root: Path) -> SourceEdit | None:
    """The statements from one line to the one before another, inside of a ``with``; None where that is not one block.

    Args:
        first: a line of the first statement.
        until: a line of the statement that stays outside, in the same function.
        header: ``with ...:``
    """
    tree = _tree(first.filename)
    if tree is None or first.filename != until.filename:
        return None
    for block in _blocks(tree):
        start = _index(block, first.line)
        end = _index(block, until.line)
        if start is None or end is None or start >= end:
            continue
        top, bottom = block[start].lineno, block[end - 1].end_lineno or block[end - 1].lineno
        lines = _lines(first.filename)[top - 1 : bottom]
        if any('"""' in line or "'''" in line for line in lines):
            return None  # to indent a text would change it
        indent = " " * block[start].col_offset
        where = f"{_place(first.filename, top, root)}" + (f"-{bottom}" if bottom > top else "")
        return SourceEdit(
            file=first.filename,
            first=top,
            last=bottom,
            lines=(f"{indent}{header}", *(f"    {line}" if line.strip() else line for line in lines)),
            words=f"put {where} into  {header}",
        )
    return None


def with_other_call(at: Frame, kind: str, new: str, without: frozenset[str], root: Path) -> SourceEdit | None:
    """The call of a class at a line, of another class and without some keywords; None where it is not found."""
    found = _statement(at)
    if found is None:
        return None
    statement, text = found
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not _calls(node.func, kind):
            continue
        dropped = [word for word in node.keywords if word.arg in without]
        call = ast.Call(
            func=ast.parse(new, mode="eval").body,
            args=node.args,
            keywords=[word for word in node.keywords if word not in dropped],
        )
        if node.end_lineno is None or node.end_col_offset is None:
            return None
        lines = text.splitlines()
        head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        told = f" without {', '.join(str(word.arg) for word in dropped)}" if dropped else ""
        module = new.rpartition(".")[0]
        indent = " " * statement.col_offset
        return SourceEdit(
            file=at.filename,
            first=node.lineno,
            last=node.end_lineno,
            lines=(
                *((f"{indent}import {module}",) if node.lineno == statement.lineno else ()),
                f"{head}{ast.unparse(ast.fix_missing_locations(call))}{tail}",
            ),
            words=f"in {_place(at.filename, node.lineno, root)} write {new} in place of {ast.unparse(node.func)}{told}",
        )
    return None


def _calls(function: ast.expr, kind: str) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(name == kind)


def _statement(at: Frame) -> tuple[ast.stmt, str] | None:
    """The innermost statement at a line, and the text of its file."""
    tree = _tree(at.filename)
    if tree is None:
        return None
    found: ast.stmt | None = None
    for block in _blocks(tree):
        index = _index(block, at.line)
        if index is not None and not _is_compound_at(block[index], at.line):
            found = block[index]
    return None if found is None else (found, "\n".join(_lines(at.filename)))


def _is_compound_at(statement: ast.stmt, line: int) -> bool:
    """Whether a line is inside the body of a statement, and not in its head."""
    body = getattr(statement, "body", None)
    return isinstance(body, list) and bool(body) and line >= body[0].lineno


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """All lists of statements, the outer ones first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _index(block: Sequence[ast.stmt], line: int) -> int | None:
    for index, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return index
    return None


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _lines(file: str) -> list[str]:
    return Path(file).read_text(encoding="utf-8").splitlines()


def _place(file: str, line: int, root: Path) -> str:
    path = Path(file)
    name = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return f"{name}:{line}"
