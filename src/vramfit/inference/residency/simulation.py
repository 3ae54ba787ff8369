"""Plays requests against an eviction policy and counts what moves; with two marks to hold it against.

The true optimum with sizes is a knapsack at every step. For a dozen models it is found exactly, by dynamic programming
over the sets of models on the card; Belady's rule (the farthest next request leaves first) is best for equal sizes
only, and is there as what people know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.errors import UsageError
from vramfit.inference.residency.eviction import EvictionPolicy, until_enough
from vramfit.inference.residency.placement import SizedModel, too_large

_MOST_SETS = 12
"""Models of which the optimum is found: it looks at every set of them at every request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """What some requests moved.

    Attributes:
        bytes: weights brought to the card.
        loads: how often a model was brought.
        evictions: how often one was dropped.
    """

    bytes: int
    loads: int
    evictions: int


def simulate(
    policy: EvictionPolicy,
    models: Mapping[str, SizedModel],
    requests: Sequence[str],
    room: int,
    *,
    believed: float = 1.0,
) -> Moves:
    """Serve requests one after the other, each by a model that must be on the card.

    Args:
        models: by name; all begin on the host.
        requests: names, in order.
        room: bytes for weights and requests, contexts not among them.
        believed: what the policy takes sizes for, as a multiple. Where even alone a model is believed not to fit, all
            others leave and it is brought all the same.

    Raises:
        UsageError: there are no models, a request names none of them, or one does not fit.
    """
    _check(models, requests, room)
    on_card: dict[str, SizedModel] = {}
    moved = loads = evictions = 0
    for name in requests:
        wanted = models[name]
        policy.requested(wanted)
        idle = [one for other, one in on_card.items() if other != name]
        weights = wanted.weight_bytes + sum(one.weight_bytes for one in idle)
        missing = weights + wanted.request_bytes - int(room / believed)
        if missing > 0:
            gone = policy.leaving(idle, missing) or tuple(idle)
            for one in gone:
                del on_card[one.name]
            evictions += len(gone)
        if name not in on_card:
            on_card[name] = wanted
            moved += wanted.weight_bytes
            loads += 1
    return Moves(bytes=moved, loads=loads, evictions=evictions)


def _check(models: Mapping[str, SizedModel], requests: Sequence[str], room: int) -> None:
    if not models:
        raise UsageError("there are no models", "Give at least one")
    if unknown := next((name for name in requests if name not in models), None):
        raise UsageError(
            f"a request names {unknown!r}, which is no model here", f"There are {', '.join(models)}"
        )
    for one in models.values():
        if one.weight_bytes + one.request_bytes > room:
            raise too_large(one, room)


class FarthestInFuture:
    """Belady's rule, which knows the requests to come: whoever is asked for the farthest ahead leaves first.

    Args:
        requests: all of them, the same that are then played.
    """

    def __init__(self, requests: Sequence[str]) -> None:
        self._next: dict[str, list[int]] = {}
        for at in range(len(requests) - 1, -1, -1):
            self._next.setdefault(requests[at], []).append(at)
        self._never = len(requests)

    def requested(self, model: SizedModel) -> None:
        """See `EvictionPolicy`."""
        self._next[model.name].pop()

    def leaving(self, idle: Sequence[SizedModel], missing: int) -> tuple[SizedModel, ...]:
        """See `EvictionPolicy`."""
        return until_enough(sorted(idle, key=lambda one: -self._ahead(one)), missing)

    def _ahead(self, model: SizedModel) -> int:
        coming = self._next.get(model.name)
        return coming[-1] if coming else self._never


def optimal_bytes(models: Mapping[str, SizedModel], requests: Sequence[str], room: int) -> int:
    """The fewest bytes with which requests that are known beforehand can be served; nobody can do with less.

    Dynamic programming over the sets of models that are on the card after each request. Bringing a model before it is
    asked for saves no bytes, so only the one asked for comes; any of the others may leave.

    Raises:
        UsageError: as of `simulate`, or there are too many models.
    """
    _check(models, requests, room)
    if len(models) > _MOST_SETS:
        raise UsageError(f"the optimum for {len(models)} models takes too long", f"Give at most {_MOST_SETS}")
    names = list(models)
    bit = {name: 1 << at for at, name in enumerate(names)}
    sets = np.arange(1 << len(names))
    weights = sum(np.where(sets & bit[name], models[name].weight_bytes, 0).astype(np.int64) for name in names)
    never = np.iinfo(np.int64).max // 2
    cost = np.full(len(sets), never, dtype=np.int64)
    cost[0] = 0
    for name in requests:
        wanted, own = models[name], bit[name]
        there = (sets & own) != 0
        come = np.full_like(cost, never)
        without = sets[~there]
        come[without | own] = np.minimum(cost[without | own], cost[without] + wanted.weight_bytes)
        for other in bit.values():  # any of the others may leave: the least over all larger sets
            if other != own:
                inside = sets[(sets & other) == 0]
                come[inside] = np.minimum(come[inside], come[inside | other])
        fits = there & (weights + wanted.request_bytes <= room)
        cost = np.where(fits, come, never)
    return int(cost.min())
