"""What a program held beyond its use, as a trace notes it: which name held which blocks, found while it ran."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from vramfit.plain import from_plain, to_plain

HOLDERS = "holders"
"""Key of a trace's meta: the notes, as JSON."""

LEAST_BYTES = 16 << 20
"""Bytes of a name below which nothing is searched for or reported."""
LEAST_SHARE = 0.02
"""Share of the peak below which nothing is searched for or reported."""


def least_bytes(peak: int) -> int:
    """Bytes from which memory held beyond its use is searched for and reported, given the peak of its device."""
    return max(LEAST_BYTES, int(LEAST_SHARE * peak))


class Beyond(Enum):
    """Why blocks count as held beyond their use."""

    UNUSED = "unused"
    """No operation has had them for a whole step, or, between steps, for several passes."""
    GRAPH = "graph"
    """The autograd graph of an earlier pass has them; so they are, unless a backward pass uses them later."""
    ERROR = "error"
    """The variables of functions that a caught error has ended."""
    CYCLE = "cycle"
    """Nothing reaches them but objects that refer to each other."""
    NO_MODULE = "no_module"
    """Parameters of a module that is gone, and their optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HolderNote:
    """One name that held blocks beyond their use.

    Attributes:
        name: what the program calls it: ``checkpoint``, ``schedule.optimizer``, ``M.outputs``.
        where: the function and line, or the module, of the variable; empty for what is no variable.
        root: where the chain of owners begins, a value of `vramfit.holders.chains.Root`.
        through: what the chain passes through, values of `vramfit.holders.chains.Through`.
        chain: the whole chain, for people.
        kind: type of what has the name, ``list``; empty for a cycle.
        elements: number of elements, where it is a tensor; else 0.
        reason: why the blocks count.
        device: whose memory it is.
        rows: rows of the allocations, as spans of first and last, each with the row from which on they count: where the
            first pass began that did not use them.
    """

    name: str
    where: str
    root: str
    through: tuple[str, ...]
    chain: str
    kind: str
    elements: int
    reason: Beyond
    device: int
    rows: tuple[tuple[int, int, int], ...]


def spans(rows: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Rows, each with a value, as spans of first and last with the value that they share."""
    found: list[tuple[int, int, int]] = []
    for row, value in sorted(rows.items()):
        if found and found[-1][1:] == (row - 1, value):
            found[-1] = (found[-1][0], row, value)
        else:
            found.append((row, row, value))
    return tuple(found)


def notes_text(notes: Iterable[HolderNote]) -> str:
    """Notes as the meta of a trace holds them."""
    return json.dumps(to_plain(list(notes)))


def holder_notes(meta: Mapping[str, Any]) -> tuple[HolderNote, ...]:
    """The notes of a trace; none where it has none, or another version's, which this one cannot read."""
    text = meta.get(HOLDERS)
    if not isinstance(text, str):
        return ()
    try:
        return from_plain(json.loads(text), tuple[HolderNote, ...])
    except (ValueError, msgspec.ValidationError):
        return ()
