"""What a store knows of a tensor: where its values are, which copies are current, who uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from vramfit.runtime.tiers.tier import Layout


@dataclass(slots=True, eq=False)
class TierPlace:
    """A copy of a tensor in a tier.

    Attributes:
        handle: the tier's.
        price: what it takes of the tier's capacity.
        ends: of copies from and to it that may be under way.
    """

    handle: Any
    price: int
    ends: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Entry:
    """A tensor of a store.

    Attributes:
        key: what it is asked for by.
        layout: of its values.
        live: number of the tier with its values.
        places: its copies by tier. Those below `live` are current, unless the tensor was written to.
        version: of the tensor on the device when the copies below were current.
        written: whether it may have been written to in a way that no version counts.
        arriving: whether it is on its way to the device, and nobody has waited for it yet.
        busy: the thread that moves it.
        leases: threads that use it, and how often.
        last_thread: which asked for it last.
        tick: when it was asked for last.
        done: when it was said that nobody asks for it soon; 0 where it was not.
        gone: whether it was taken out of the store.
    """

    key: Hashable
    layout: Layout
    live: int = -1
    places: dict[int, TierPlace] = field(default_factory=dict)
    version: int = 0
    written: bool = False
    arriving: bool = False
    busy: int | None = None
    leases: Counter[int] = field(default_factory=Counter)
    last_thread: int = 0
    tick: int = 0
    done: int = 0
    gone: bool = False

    @property
    def free(self) -> bool:
        """Whether nobody moves it and nobody has a lease."""
        return self.busy is None and not self.leases


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUsage:
    """What a tier holds.

    Attributes:
        name: of the tier.
        used: bytes, as the tier counts them.
        capacity: bytes at most.
        tensors: how many copies are there.
        peak: the most that was used.
    """

    name: str
    used: int
    capacity: int
    tensors: int
    peak: int


@dataclass(slots=True)
class Traffic:
    """What a store has done so far.

    Attributes:
        found: accesses that found the tensor on the device.
        awaited: accesses that found it on its way, by a prefetch.
        woken: accesses that brought it.
        prefetched: tensors brought before they were asked for.
        sent_down: copies to a tier below.
        spared: tensors that left without a copy, since that below was current.
        moved_bytes: bytes of all copies.
    """

    found: int = 0
    awaited: int = 0
    woken: int = 0
    prefetched: int = 0
    sent_down: int = 0
    spared: int = 0
    moved_bytes: int = 0
