"""Edits of a program's source that a person would make, and the program with them, without touching a file.

An edit replaces whole lines. Several of one file are applied from its end, so that each is told by the line numbers of
the file as it is.
"""

from __future__ import annotations

import ast
import os
import tokenize
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
    lines, encoding = _read(file)
    for edit in sorted(edits, key=lambda one: (one.first, one.last), reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines).encode(encoding)


def inserted_before(at: Frame, new: Sequence[str], root: Path) -> SourceEdit | None:
    """New lines before the statement at a line, at its indentation; None where there is no such statement."""
    found = _statement(at)
    if found is None:
        return None
    statement, lines = found
    indent = _indent(lines[statement.lineno - 1])
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
        if any(map(_has_long_text, block[start:end])):
            return None  # to indent a text would change it
        lines = _read(first.filename)[0][top - 1 : bottom]
        indent = _indent(lines[0])
        deeper = "\t" if indent.startswith("\t") else "    "
        where = f"{_place(first.filename, top, root)}" + (f"-{bottom}" if bottom > top else "")
        return SourceEdit(
            file=first.filename,
            first=top,
            last=bottom,
            lines=(f"{indent}{header}", *(f"{deeper}{line}" if line.strip() else line for line in lines)),
            words=f"put {where} into  {header}",
        )
    return None


def wrapped_alone(at: Frame, header: str, root: Path) -> SourceEdit | None:
    """The statement at a line inside of a ``with``; None where there is none, or where a text would be indented."""
    found = _statement(at)
    if found is None or _has_long_text(found[0]) or not isinstance(found[0], _SIMPLE):
        return None
    statement, lines = found
    top, bottom = statement.lineno, statement.end_lineno or statement.lineno
    indent = _indent(lines[top - 1])
    if lines[top - 1][: statement.col_offset].strip():
        return None  # behind another on its line
    deeper = "\t" if indent.startswith("\t") else "    "
    where = f"{_place(at.filename, top, root)}" + (f"-{bottom}" if bottom > top else "")
    return SourceEdit(
        file=at.filename,
        first=top,
        last=bottom,
        lines=(f"{indent}{header}", *(f"{deeper}{line}" for line in lines[top - 1 : bottom])),
        words=f"put {where} into  {header}",
    )


def with_call_before(at: Frame, methods: frozenset[str], new: str, root: Path) -> SourceEdit | None:
    """A method called on what a line calls another one on: ``model.to(device)`` as ``model.half().to(device)``.

    Args:
        methods: names of the method that the line calls.
        new: what stands before it then, ``.half()``.
    """
    found = _method_call(at, methods)
    if found is None:
        return None
    node, function, lines = found
    owner = function.value
    if owner.end_lineno is None or owner.end_col_offset is None:
        return None
    told = f"{ast.unparse(owner)}{new}.{function.attr}(...)"
    return _inserted(
        at, lines, owner.end_lineno, owner.end_col_offset, new, f"write {told}", node.lineno, root
    )


def with_keyword(at: Frame, methods: frozenset[str], keyword: str, root: Path) -> SourceEdit | None:
    """A method's call at a line with one keyword more; None where there is none, or where it has it already.

    Args:
        methods: names of the method.
        keyword: as it is written, ``use_cache=False``.
    """
    found = _method_call(at, methods)
    if found is None:
        return None
    node, function, lines = found
    if any(word.arg == keyword.partition("=")[0] for word in node.keywords):
        return None
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    line = lines[node.end_lineno - 1].encode()[: node.end_col_offset - 1].decode().rstrip()
    comma = "" if line.endswith((",", "(")) or not line else ", "
    told = f"write {ast.unparse(function)}(..., {keyword})"
    return _inserted(
        at, lines, node.end_lineno, node.end_col_offset - 1, f"{comma}{keyword}", told, node.lineno, root
    )


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


def _method_call(at: Frame, methods: frozenset[str]) -> tuple[ast.Call, ast.Attribute, list[str]] | None:
    """The first call of a method in the statement at a line."""
    found = _statement(at)
    for node in ast.walk(found[0]) if found is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            assert found is not None
            return node, node.func, found[1]
    return None


def _inserted(
    at: Frame, lines: list[str], line: int, column: int, new: str, words: str, told_at: int, root: Path
) -> SourceEdit:
    """A line with something more at a column, which is counted in bytes of UTF-8."""
    text = lines[line - 1].encode()
    return SourceEdit(
        file=at.filename,
        first=line,
        last=line,
        lines=((text[:column] + new.encode() + text[column:]).decode(),),
        words=f"in {_place(at.filename, told_at, root)} {words}",
    )


def with_other_call(at: Frame, kind: str, new: str, without: frozenset[str], root: Path) -> SourceEdit | None:
    """The call of a class at a line, of another class and without some keywords; None where it is not found."""
    found = _statement(at)
    if found is None:
        return None
    statement, lines = found
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
        head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        told = f" without {', '.join(str(word.arg) for word in dropped)}" if dropped else ""
        module = new.rpartition(".")[0]
        return SourceEdit(
            file=at.filename,
            first=statement.lineno,
            last=node.end_lineno,
            lines=(
                f"{_indent(lines[statement.lineno - 1])}import {module}",
                *lines[statement.lineno - 1 : node.lineno - 1],
                f"{head}{ast.unparse(ast.fix_missing_locations(call))}{tail}",
            ),
            words=f"in {_place(at.filename, node.lineno, root)} write {new} in place of {ast.unparse(node.func)}{told}"
            f", after  import {module}",
        )
    return None


def _calls(function: ast.expr, kind: str) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(name == kind)


def _has_long_text(statement: ast.stmt) -> bool:
    """Whether a statement has a text over several lines."""
    texts = (node for node in ast.walk(statement) if isinstance(node, ast.JoinedStr | ast.Constant))
    return any(
        (node.end_lineno or node.lineno) > node.lineno
        for node in texts
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes)
    )


def _indent(line: str) -> str:
    """The blanks and tabs with which a line begins."""
    return line[: len(line) - len(line.lstrip())]


def _statement(at: Frame) -> tuple[ast.stmt, list[str]] | None:
    """The innermost statement at a line, and the lines of its file."""
    tree = _tree(at.filename)
    if tree is None:
        return None
    found: ast.stmt | None = None
    for block in _blocks(tree):
        index = _index(block, at.line)
        if index is not None and not _is_compound_at(block[index], at.line):
            found = block[index]
    return None if found is None else (found, _read(at.filename)[0])


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


def _read(file: str) -> tuple[list[str], str]:
    """The lines of a source as Python counts them, without their ends, and its encoding."""
    with tokenize.open(file) as source:
        text, encoding = source.read(), source.encoding
    # Not splitlines(): it also ends a line at a form feed, and where Unicode has a line's end.
    return text.split("\n"), encoding


def _place(file: str, line: int, root: Path) -> str:
    path = Path(file)
    name = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return f"{name}:{line}"
