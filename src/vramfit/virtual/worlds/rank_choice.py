"""Which ranks of a world to run, and which of the others each of them stands for. No torch.

NOTE [Kinds of ranks]
Nobody runs 1,024 processes to learn what one takes. Ranks come in kinds: with equal shards all are alike; where a
dimension does not divide, the first ranks have whole shards, one has the remainder, the last have none
(torch/distributed/tensor: Shard splits as ``torch.chunk`` does); the stages of a pipeline differ. So the first and the
last rank are run, with every rank that one of them waits for (the other stages of its pipeline), and where two
neighbours of those that ran differ, the one in the middle between them, until the ranks at which kinds change are found
or enough have run. A rank between two alike is taken to be like them; a rank between two that differ, which was not
run, to be like the larger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from vramfit.errors import UsageError

MOST_BETWEEN = 6
"""Ranks that ``auto`` runs besides the first, the last and those that are waited for."""


class ChoiceKind(Enum):
    """How ranks are chosen."""

    AUTO = "auto"
    ALL = "all"
    NAMED = "named"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChoice:
    """Which ranks to run.

    Attributes:
        kind: how they are chosen.
        named: those that the user named.
    """

    kind: ChoiceKind = ChoiceKind.AUTO
    named: tuple[int, ...] = ()

    def first(self, world_size: int) -> tuple[int, ...]:
        """The ranks to begin with."""
        if self.kind is ChoiceKind.ALL:
            return tuple(range(world_size))
        if self.kind is ChoiceKind.NAMED:
            return self.named
        return (0,) if world_size == 1 else (0, world_size - 1)


def rank_choice(text: str | int | Sequence[int], world_size: int) -> RankChoice:
    """The choice that a user wrote: ``auto``, ``all``, a rank, or several, as ``"0,7"`` or ``"0-3,7"``.

    Raises:
        UsageError: it cannot be read, or a rank is beyond the world.
    """
    if isinstance(text, str) and text.strip() in (ChoiceKind.AUTO.value, ChoiceKind.ALL.value):
        return RankChoice(kind=ChoiceKind(text.strip()))
    named: set[int] = set()
    for part in text.split(",") if isinstance(text, str) else [text] if isinstance(text, int) else text:
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", str(part))
        if found is None or isinstance(part, bool):
            raise UsageError(
                f"{part!r} names no rank", "Write auto, all, a rank such as 7, or several: 0,7 or 0-3"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UsageError(f"the ranks {part} go backwards", f"Write {last}-{first}")
        if last >= world_size:
            raise UsageError(
                f"rank {last} is beyond a world of {world_size} ranks",
                f"Ranks count from 0 to {world_size - 1}",
            )
        named.update(range(first, last + 1))
    if not named:
        raise UsageError("no rank is named", "Write auto, all, a rank such as 7, or several: 0,7")
    return RankChoice(kind=ChoiceKind.NAMED, named=tuple(sorted(named)))


def between(kinds: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks in the middle between neighbours that ran and differ. See NOTE [Kinds of ranks].

    Args:
        kinds: what makes ranks alike, of each that ran.
    """
    ran = sorted(kinds)
    return tuple(
        (low + high) // 2 for low, high in pairwise(ran) if kinds[low] != kinds[high] and high - low > 1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Ranks that were not run, and the one that stands for them.

    Attributes:
        rank: the one that ran.
        first, last: those for which it stands.
        alike: both neighbours that ran are alike; False where they differ and the larger was taken.
    """

    rank: int
    first: int
    last: int
    alike: bool


def standings(kinds: Mapping[int, object], size_of: Callable[[int], int]) -> tuple[Standing, ...]:
    """Which of the ranks that ran stand for those between them.

    Args:
        kinds: as for `between`.
        size_of: the bytes of a rank that ran.
    """
    found = []
    for low, high in pairwise(sorted(kinds)):
        if high - low > 1:
            alike = kinds[low] == kinds[high]
            rank = low if alike or size_of(low) >= size_of(high) else high
            found.append(Standing(rank=rank, first=low + 1, last=high - 1, alike=alike))
    return tuple(found)
