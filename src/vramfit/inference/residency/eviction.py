"""Who leaves the card when another model needs room: policies that see requests one by one, without any model.

Weights do not change on the card, so whoever leaves is dropped, not copied back; what counts is what it costs to bring
a model again: its bytes over the link, times how likely it is to be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol, runtime_checkable

from vramfit.inference.residency.placement import SizedModel

HALF_LIFE = 128
"""Requests after which one counts half. From 16 to 1,024 what moves differs by about 1 %: longer is better while the
same models stay popular, shorter when others become so (benchmarks/language/residency.py --half-lives)."""
_EXACT = 12
"""Models on the card of which every set is weighed; of more the least likely ones go first."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses who leaves."""

    def requested(self, model: SizedModel) -> None:
        """A model is asked for. Called for every request, in order, before room is made for it."""
        ...

    def leaving(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """Who leaves so that ``missing`` bytes of weights become free.

        Args:
            idle: the models on the card that may leave, the one asked for not among them.
            missing: bytes, above 0.

        Returns:
            Some of them, enough; none where all together are not enough.
        """
        ...


def until_enough(order: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
    """The first models in an order that free enough; none where all are not enough."""
    chosen: list[SizedModel] = []
    for one in order:
        if missing <= 0:
            break
        chosen.append(one)
        missing -= one.weight_bytes
    return tuple(chosen) if missing <= 0 else ()


class LeastRecentlyUsed:
    """Whoever was asked for the longest ago leaves first."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._now = 0

    def requested(self, model: SizedModel) -> None:
        """See `EvictionPolicy`."""
        self._now += 1
        self._last[model.name] = self._now

    def leaving(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """See `EvictionPolicy`."""
        return until_enough(sorted(idle, key=lambda one: self._last.get(one.name, 0)), missing)


class GreedyDualSize:
    """GreedyDual-Size with frequency (Cherkasova 1998), the cost of a model being its bytes.

    The value of a model is the clock at its last request plus its number of requests times cost per byte, which is 1
    here; the lowest leaves first, and the clock goes up to its value.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._count: dict[str, int] = {}
        self._value: dict[str, float] = {}

    def requested(self, model: SizedModel) -> None:
        """See `EvictionPolicy`."""
        self._count[model.name] = self._count.get(model.name, 0) + 1
        self._value[model.name] = self._clock + self._count[model.name]

    def leaving(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """See `EvictionPolicy`."""
        chosen = until_enough(sorted(idle, key=lambda one: self._value.get(one.name, 0.0)), missing)
        for one in chosen:
            self._clock = max(self._clock, self._value.get(one.name, 0.0))
            self._count.pop(one.name, None)
        return chosen


class CheapestReturn:
    """The set leaves whose return costs the least: bytes times the likelihood of the next request.

    Likelihoods are shares of the requests so far, of which older ones count less. Of all sets that free enough the
    cheapest is taken; of equals the one with fewer bytes, and then the one unused for longer.

    Args:
        half_life: requests after which one counts half.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._grow = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._seen: dict[str, float] = {}
        self._last: dict[str, int] = {}
        self._now = 0

    def requested(self, model: SizedModel) -> None:
        """See `EvictionPolicy`."""
        self._now += 1
        self._last[model.name] = self._now
        self._weight *= self._grow
        self._seen[model.name] = self._seen.get(model.name, 0.0) + self._weight
        if self._weight > 1e100:
            self._seen = {name: count / self._weight for name, count in self._seen.items()}
            self._weight = 1.0

    def likelihood(self, name: str) -> float:
        """How likely a model is to be asked for next."""
        total = sum(self._seen.values())
        return self._seen.get(name, 0.0) / total if total else 0.0

    def cost(self, model: SizedModel) -> float:
        """Bytes that its leaving is expected to cost at the next request."""
        return model.weight_bytes * self.likelihood(model.name)

    def leaving(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """See `EvictionPolicy`."""
        if sum(one.weight_bytes for one in idle) < missing:
            return ()
        if len(idle) > _EXACT:
            return self._without_needless(idle, missing)
        costs = {one.name: self.cost(one) for one in idle}
        best: tuple[float, int, int] | None = None
        chosen: tuple[SizedModel, ...] = ()
        for count in range(1, len(idle) + 1):
            for some in combinations(idle, count):
                freed = sum(one.weight_bytes for one in some)
                if freed < missing:
                    continue
                key = (
                    sum(costs[one.name] for one in some),
                    freed,
                    max(self._last.get(one.name, 0) for one in some),
                )
                if best is None or key < best:
                    best, chosen = key, some
        return chosen

    def _without_needless(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """The least likely ones until it is enough, without those that the later ones make needless."""
        order = sorted(idle, key=lambda one: (self.likelihood(one.name), self._last.get(one.name, 0)))
        chosen = list(until_enough(order, missing))
        spare = sum(one.weight_bytes for one in chosen) - missing
        for one in sorted(chosen, key=lambda one: -self.cost(one)):
            if one.weight_bytes <= spare:
                spare -= one.weight_bytes
                chosen.remove(one)
        return tuple(chosen)
