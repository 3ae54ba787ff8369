"""Which ranks of a world to run, and which of the others each of them stands for. No torch.

NOTE [Kinds of ranks]
Nobody runs 1,024 processes to learn what one takes. Ranks come in kinds: with equal shards all are alike; where a
dimension does not divide, the first ranks have whole shards, one has the remainder, the last have none
(torch/distributed/tensor: Shard splits as ``torch.chunk`` does); the stages of a pipeline differ. So the first and the
last rank are run, with every rank that one of them waits for (the other stages of its pipeline). Where they differ, the
ranks are put in order, and where two neighbours in it of those that ran differ, the one in the middle between them is
run, until it is known where kinds change or enough have run. The order is that of the places which ranks hold in the
groups of the program, where these decide (see NOTE [Places] in rank_places.py), or else that of their numbers.

What is taken of a rank that was not run:

- it is like one that holds the same place and ran;
- between two that are alike, it is like them;
- otherwise it may differ, and the larger of its neighbours stands for it. The same holds between two that are alike
  where kinds are no stretches of the order (one comes again after another), or change more often than could be
  followed: whole shards, remainder and none are two changes, but where each rank holds other slices of parameters
  (FSDP with ``use_orig_params``) nearly all differ.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise

from vramfit.errors import UsageError

MOST_BETWEEN = 6
"""Ranks that ``auto`` runs to find where kinds change, besides the first, the last and those that are waited for."""
_MOST_CHANGES = 2
"""Changes of kinds whose ranks were not found, beyond which those between two that are alike are in doubt."""


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


def between(kinds: Mapping[int, object], order: Sequence[int]) -> tuple[int, ...]:
    """The ranks to run next: those in the middle between neighbours that differ, or may. See NOTE [Kinds of ranks].

    Args:
        kinds: what makes ranks alike, of each that ran.
        order: the number of each rank's place; ranks of the same place are alike.
    """
    places = _places(kinds, order)
    ran = sorted(places)
    wanted = [place for place in (0, max(order)) if place not in places]
    gaps = [(low, high) for low, high in pairwise(ran) if high - low > 1]
    wanted += [(low + high) // 2 for low, high in gaps if places[low] != places[high]]
    if _come_again([places[place] for place in ran]):
        wanted += [(low + high) // 2 for low, high in gaps if places[low] == places[high]]
    return tuple(order.index(place) for place in wanted)


def _places(kinds: Mapping[int, object], order: Sequence[int]) -> dict[int, object]:
    """The kind of each place of which a rank ran."""
    return {order[rank]: kind for rank, kind in kinds.items()}


def _come_again(kinds: Sequence[object]) -> bool:
    """Whether a kind comes again after another one."""
    changes = sum(one != other for one, other in pairwise(kinds))
    return changes >= len(set(kinds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Ranks that were not run, and the one that stands for them.

    Attributes:
        rank: the one that ran.
        first, last: those for which it stands.
        alike: they are taken to be like it; False where they may differ, and it is the larger of their neighbours.
        same_place: they are, since it holds the same place; False where they lie between two that are alike.
    """

    rank: int
    first: int
    last: int
    alike: bool
    same_place: bool = False


def standings(
    kinds: Mapping[int, object], size_of: Callable[[int], int], order: Sequence[int]
) -> tuple[Standing, ...]:
    """Which of the ranks that ran stand for the others.

    Args:
        kinds, order: as for `between`.
        size_of: the bytes of a rank that ran.
    """
    holder: dict[int, int] = {}
    for rank in sorted(kinds):
        holder.setdefault(order[rank], rank)
    ran = sorted(holder)
    found_kinds = [kinds[holder[place]] for place in ran]
    gaps = [high - low > 1 for low, high in pairwise(ran)]
    open_changes = sum(
        gap and one != other for gap, (one, other) in zip(gaps, pairwise(found_kinds), strict=True)
    )
    doubted = _come_again(found_kinds) or open_changes > _MOST_CHANGES

    def holder_of(rank: int) -> tuple[int, bool, bool] | None:
        """Who stands for a rank, whether alike, and whether for the same place; None for one that ran."""
        place = order[rank]
        if rank in kinds:
            return None
        if place in holder:
            return holder[place], True, True
        at = bisect(ran, place)
        low, high = holder[ran[max(0, at - 1)]], holder[ran[min(at, len(ran) - 1)]]
        if 0 < at < len(ran) and kinds[low] == kinds[high] and not doubted:
            return low, True, False
        return low if size_of(low) >= size_of(high) else high, False, False

    found = []
    for held, those in groupby(range(len(order)), holder_of):
        if held is not None:
            first, *others = those
            rank, alike, same_place = held
            last = others[-1] if others else first
            found.append(Standing(rank=rank, first=first, last=last, alike=alike, same_place=same_place))
    return tuple(found)
