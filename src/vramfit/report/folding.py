"""Text for a terminal of any width: sentences broken at words, rows and tables folded; no figure is ever cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import compress

from rich.cells import cell_len, chop_cells
from rich.text import Text

NARROW = 60
"""Columns below which rows are written as sentences instead of aligned, and indents are short."""
_DEEPEST = 4
"""Characters of indent on a narrow terminal."""
_BOUND = re.compile(
    r"(?<=\d) (?=(?:[KMGT]i?)?B(?:/s)?\b|T?FLOP/s|MHz\b|bytes\b|[mµu]?s\b|%)| (?=× ?\d)|(?<=×) (?=\d)"
)
"""The space between a number and its unit, and before a count."""
_EQUALS = re.compile(r" (?== )|(?<= =) ")
"""The spaces on both sides of an equals sign."""
_QUOTED = re.compile(r'"[^"]{1,24}"')
"""A name in quotes, as of a card."""
_JOINT, _LOOSE = "\ue000", "\ue001"
"""Stand for such spaces while words are told apart (of private use: in no text). Those beside an equals sign give way
first."""
_WORD = re.compile(r"\S+")
_SEPARATORS = (re.compile(r"(?<=,)(?=.)"), re.compile(r"(?<=[/:])(?=.)"), re.compile(r"(?<=[_=\-\[(])(?=.)"))
"""Where a word is parted that is longer than a line, the best first."""
_SEPARATOR = re.compile(r",(?=\S)| +(?=\S)")
_SPACES = re.compile(r"(?<=\S) {3,}")


def broken(text: Text, width: int, *, indent: int = 2) -> list[Text]:
    """Break a sentence into lines of ``width`` characters, all but the first indented; a number keeps its unit.

    On a narrow terminal both this indent and the sentence's own are at most four characters.
    """
    text = text.copy()
    text.expand_tabs()
    if width < NARROW:
        indent = min(indent, _DEEPEST)
        text = text[max(0, _lead(text) - _DEEPEST) :]
    first, *more = text.split("\n")
    lines = _wrapped(first, width, width - indent)
    for paragraph in more:
        lines += _wrapped(paragraph[_lead(paragraph) :], width - indent, width - indent)
    return [lines[0], *(Text(" " * indent) + line for line in lines[1:])]


def _wrapped(text: Text, first: int, rest: int) -> list[Text]:
    """A paragraph in lines of ``rest`` characters, but ``first`` for the first of them."""
    text = text.copy()
    limit = max(1, min(rest, first - _lead(text)))
    bound = _BOUND.sub(_JOINT, _EQUALS.sub(_LOOSE, text.plain))
    bound = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _JOINT), bound)
    text.plain = _WORD.sub(lambda word: _loosened(word[0], limit), bound)
    cuts, begin, room = [], 0, first
    for word in _WORD.finditer(text.plain):
        start = word.start()
        for piece in _pieces(word[0], limit):
            end = start + len(piece)
            if start > begin and cell_len(text.plain[begin:end]) > room:
                cuts.append(start)
                begin, room = start, rest
            start = end
    lines = list(text.divide(cuts))
    for line in lines:
        line.rstrip()
        line.plain = line.plain.replace(_JOINT, " ").replace(_LOOSE, " ")
    return lines


def _pieces(word: str, width: int) -> list[str]:
    """A word in pieces of at most ``width`` characters, parted where it reads best: after commas, then within names."""
    pieces = [word]
    for separator in _SEPARATORS:
        pieces = [
            part
            for piece in pieces
            for part in ([piece] if cell_len(piece) <= width else separator.split(piece))
        ]
    return [part for piece in pieces for part in chop_cells(piece, width)]


def _loosened(word: str, width: int) -> str:
    """Words that were joined, apart again from the left as far as they are too long together."""
    for joint in (_LOOSE, _JOINT):
        parts = word.split(" ")
        for at, part in enumerate(parts):
            apart = ""
            while len(part) > width and joint in part:
                first, _, part = part.partition(joint)
                apart += f"{first} "
            parts[at] = apart + part
        word = " ".join(parts)
    return word


def folded(line: Text, width: int) -> list[Text]:
    """A line as it is where it fits; else broken, on a narrow terminal with its columns drawn together first."""
    if line.cell_len <= width:
        return [line]
    if width < NARROW:
        line = _drawn_together(line)
    return broken(line, width, indent=_lead(line) + 2)


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Text]],
    width: int,
    *,
    most: int = 40,
    notes: Sequence[Text] = (),
) -> Iterator[Text]:
    """A table of names and figures.

    Where it is wider than the terminal, empty columns go, and those of nothing but 0 give way to a sentence; where
    that is not enough, each row is told below its name.

    Args:
        rows: their cells. The first column is text, folded between words and after commas; the others are figures.
        most: characters from which such a word is broken itself rather than the table given up.
        notes: a remark on each row, behind it where there is room.
    """
    notes = notes or [Text()] * len(rows)
    longest = min(most, max((part.cell_len for row in rows for part in _parts(row[0])), default=0))
    left_out: list[str] = []
    if _room(heads, rows, width) < longest:
        empty = [at > 0 and all(row[at].plain in ("", "0") for row in rows) for at in range(len(heads))]
        left_out = [head for at, head in enumerate(heads) if empty[at] and any(row[at] for row in rows)]
        kept = [not one for one in empty]
        heads, rows = list(compress(heads, kept)), [list(compress(row, kept)) for row in rows]
    if _room(heads, rows, width) >= longest:
        yield from _lined_up(heads, rows, notes, width)
    else:
        for row, note in zip(rows, notes, strict=True):
            yield from _told(heads, row, note, width)
    if left_out:
        yield from broken(Text(f"in every row 0: {', '.join(left_out)}", style="dim"), width)


def _lined_up(
    heads: Sequence[str], rows: Sequence[Sequence[Text]], notes: Sequence[Text], width: int
) -> Iterator[Text]:
    first = min(_widest(heads, rows, 0), _room(heads, rows, width))
    figures = [_widest(heads, rows, at) for at in range(1, len(heads))]
    yield _row([Text(head, style="bold") for head in heads], [first, *figures])
    for row, note in zip(rows, notes, strict=True):
        name, *more = _folded_name(row[0], first)
        line = _row([name, *row[1:]], [first, *figures])
        if note and line.cell_len + 2 + note.cell_len <= width:
            yield Text.assemble(line, "  ", note)
            note = Text()
        else:
            yield line
        yield from more
        if note:
            yield from broken(Text("  ") + note, width, indent=2)


def _widest(heads: Sequence[str], rows: Sequence[Sequence[Text]], at: int) -> int:
    return max([len(heads[at]), *(row[at].cell_len for row in rows)])


def _room(heads: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> int:
    """What the figures leave to the first column."""
    return width - sum(2 + _widest(heads, rows, at) for at in range(1, len(heads)))


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    name, *figures = (cell.copy() for cell in cells)
    name.pad_right(widths[0] - name.cell_len)
    for cell, width in zip(figures, widths[1:], strict=True):
        cell.pad_left(width - cell.cell_len)
    return Text("  ").join([name, *figures])


def _parts(name: Text) -> Sequence[Text]:
    return list(name.divide(match.end() for match in _SEPARATOR.finditer(name.plain)))


def _folded_name(name: Text, width: int) -> list[Text]:
    """A name in lines of ``width`` characters, broken between words and after commas where it can be."""
    lines = [Text()]
    for part in _parts(name):
        bare = part.copy()
        bare.rstrip()
        if lines[-1] and lines[-1].cell_len + bare.cell_len > width:
            lines.append(Text())
        lines[-1] = lines[-1] + part
    for line in lines:
        line.rstrip()
    return [
        whole
        for line in lines
        for whole in ([line] if line.cell_len <= width else broken(line, width, indent=0))
    ]


def _told(heads: Sequence[str], row: Sequence[Text], note: Text, width: int) -> Iterator[Text]:
    yield from _folded_name(row[0], width)
    cells = [Text(f"{head}{_JOINT}") + cell for head, cell in zip(heads[1:], row[1:], strict=True) if cell]
    yield from broken(Text("  ") + Text(", ").join(cells), width, indent=2)
    if note:
        yield from broken(Text("  ") + note, width, indent=2)


def _drawn_together(line: Text) -> Text:
    """The same with at most two spaces between words."""
    together, end = Text(), 0
    for match in _SPACES.finditer(line.plain):
        together.append_text(line[end : match.start() + 2])
        end = match.end()
    return together.append_text(line[end:])


def _lead(text: Text) -> int:
    """How many spaces a text begins with."""
    return len(text.plain) - len(text.plain.lstrip())
