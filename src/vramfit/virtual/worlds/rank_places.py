"""Which ranks hold the same place in the process groups of a program, and whether that makes them alike. No torch.

NOTE [Places]
Ranks do what their places in the program's groups make them do. In hybrid sharding over two nodes of eight, ranks 3 and
11 are both the fourth of the eight that share the parameters out, and hold the same; ranks 3 and 4 need not. A mesh of
pipeline, data and tensor parallelism has one kind of groups for each dimension, and a rank one place in each of them.
Which of them decide is not known beforehand. So the groups that the program made are put together to kinds of groups,
each of which has every rank once; the ranks of a node are one kind more, for one of them may work for its node. Each
kind, and each two of them, are a guess: ranks of equal places there are alike. The guesses with fewest places come
first. One is given up where two ranks that ran contradict it, and holds once the first and the last rank are each like
the one farthest from it that shares its place; where those have not run, they are run, at most `MOST_TRIED` in all. If
none holds, ranks are told apart by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_TRIED = 6
"""Ranks that ``auto`` runs to find out whether equal places make ranks alike."""
_MOST_KINDS = 8
"""Kinds of groups of which guesses are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceGuesses:
    """The guesses about a program's ranks; see NOTE [Places].

    Attributes:
        size: ranks of the world.
        guesses: for each the number of every rank's place, counted as they first come; fewest places first.
    """

    size: int
    guesses: tuple[tuple[int, ...], ...] = ()

    def order(self, kinds: Mapping[int, object]) -> Sequence[int]:
        """The number of each rank's place: of the first guess that holds, or else that of the rank.

        Args:
            kinds: what makes ranks alike, of each that ran.
        """
        for guess in self.guesses:
            if not _contradicted(guess, kinds) and all(rank in kinds for rank in _farthest(guess)):
                return guess
        return range(self.size)

    def untried(self, kinds: Mapping[int, object]) -> int | None:
        """A rank to run, to see whether a guess holds; None where nothing is to be found out.

        Args:
            kinds: as for `order`.
        """
        if len(set(kinds.values())) < 2:
            return None
        for guess in self.guesses:
            if not _contradicted(guess, kinds):
                return next((rank for rank in _farthest(guess) if rank not in kinds), None)
        return None


def _contradicted(guess: Sequence[int], kinds: Mapping[int, object]) -> bool:
    """Whether two ranks that ran share a place and differ."""
    seen: dict[int, object] = {}
    return any(seen.setdefault(guess[rank], kind) != kind for rank, kind in kinds.items())


def _farthest(guess: Sequence[int]) -> tuple[int, int]:
    """The last rank in the place of the first, and the first in the place of the last."""
    return len(guess) - 1 - guess[::-1].index(guess[0]), guess.index(guess[-1])


def _can_be_tried(guess: Sequence[int]) -> bool:
    """Whether the first rank and the last share their places with others."""
    with_first, with_last = _farthest(guess)
    return with_first > 0 and with_last < len(guess) - 1


def rank_places(groups: Iterable[tuple[int, ...]], size: int, per_node: int) -> PlaceGuesses:
    """The guesses that a program's groups give rise to.

    Args:
        groups: ranks of each, in its order.
        size: ranks of the world.
        per_node: ranks of a node.
    """
    kinds = [_numbered(kind) for kind in _kinds_of_groups(groups, size)]
    if per_node < size:
        kinds.append(_numbered([rank % per_node for rank in range(size)]))
    telling = [kind for kind in dict.fromkeys(kinds) if 1 < len(set(kind)) < size][:_MOST_KINDS]
    both = [_numbered(zip(*two, strict=True)) for two in combinations(telling, 2)]
    guesses = [guess for guess in dict.fromkeys((*telling, *both)) if _can_be_tried(guess)]
    return PlaceGuesses(size=size, guesses=tuple(sorted(guesses, key=max)))


def _kinds_of_groups(groups: Iterable[tuple[int, ...]], size: int) -> list[list[int]]:
    """The place of each rank in each kind of groups: those of one size that have every rank once between them."""
    kinds: list[dict[int, int]] = []
    filling: dict[int, list[dict[int, int]]] = {}
    for group in groups:
        those = filling.setdefault(len(group), [])
        kind = next((kind for kind in those if kind.keys().isdisjoint(group)), None)
        if kind is None:
            kind = {}
            kinds.append(kind)
            those.append(kind)
        kind.update((rank, at) for at, rank in enumerate(group))
        if len(kind) == size:
            those.remove(kind)
    return [[kind[rank] for rank in range(size)] for kind in kinds if kind.keys() == set(range(size))]


def _numbered(places: Iterable[object]) -> tuple[int, ...]:
    """Places by numbers, as they first come."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)
