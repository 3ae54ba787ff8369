"""The process groups that a program makes, written down in few words. No torch.

Every rank makes all groups of the world, also those that it is no member of, and meshes make thousands of them in
regular rows: 128 groups of 8 neighbours are one entry, ``0,1,8,8,128``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

_MOST = 1024
"""Entries that are kept. A program whose groups need more is told of as one that makes none."""


class MadeGroups:
    """Groups in the order in which they are made, each once.

    >>> made = MadeGroups()
    >>> for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 3)):
    ...     made.add(ranks)
    >>> made.text
    '0,1,2,2,2;0,2,2,1,2;=0,1,3'
    """

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()
        self._entries: list[list[int] | tuple[int, ...]] = []

    def add(self, ranks: Sequence[int]) -> None:
        """Note a group; one of a single rank says nothing.

        Args:
            ranks: its members, in the group's order.
        """
        members = tuple(ranks)
        if len(members) < 2 or members in self._seen or len(self._entries) > _MOST:
            return
        self._seen.add(members)
        steps = {high - low for low, high in pairwise(members)}
        if len(steps) > 1:
            self._entries.append(members)
            return
        first, step, size = members[0], steps.pop(), len(members)
        last = self._entries[-1] if self._entries else None
        if isinstance(last, list) and last[1:3] == [step, size]:
            if last[4] == 1:
                last[3] = first - last[0]
            if first == last[0] + last[3] * last[4]:
                last[4] += 1
                return
        self._entries.append([first, step, size, 0, 1])

    @property
    def text(self) -> str:
        """All of them; empty where there are none, or too many.

        An entry is the first rank of a group, its step and size, how far the next one is shifted, and how many there
        are; or ``=`` and the ranks of one group.
        """
        if len(self._entries) > _MOST:
            return ""
        return ";".join(
            ("" if isinstance(entry, list) else "=") + ",".join(map(str, entry)) for entry in self._entries
        )


def groups_in(text: str) -> Iterator[tuple[int, ...]]:
    """The groups that a text tells of.

    >>> list(groups_in("0,1,2,2,2;=0,1,3"))
    [(0, 1), (2, 3), (0, 1, 3)]

    Raises:
        ValueError: it is none of ours.
    """
    for entry in text.split(";") if text else ():
        numbers = tuple(map(int, entry.removeprefix("=").split(",")))
        if entry.startswith("="):
            yield numbers
            continue
        first, step, size, shift, count = numbers
        for begin in range(first, first + shift * count, shift) if shift else (first,):
            yield tuple(range(begin, begin + step * size, step))


def groups_of_all(texts: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The groups that several ranks tell of, each once."""
    return tuple(dict.fromkeys(group for text in dict.fromkeys(texts) for group in groups_in(text)))
