"""How much memory the allocator of a recorded device had, and which cache releases were for lack of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator.core import SMALL_REQUEST, SMALL_SEGMENT
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.model import EventKind, Segment
from vramfit.trace.settings import recorded_config


class CapacitySource(Enum):
    """How the memory that the allocator could have is known."""

    CARD = "card"
    """The trace names the card's memory and its context."""
    OOM = "out of memory"
    """A request failed: what was reserved then, and what was free."""
    RETRIES = "retries"
    """The cache was given back for requests that had failed: the most that was ever reserved, or a little more."""
    UNKNOWN = "unknown"
    """Nothing ever failed, so the recording only says that there was enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Memory for the allocator on one device.

    Attributes:
        bytes: the most that can be reserved; 0 if unknown, and where the context takes all of the card. Where `source`
            is RETRIES it is a lower bound.
        source: how that is known.
        below: for RETRIES, a bound that it does not reach; otherwise 0.
    """

    bytes: int
    source: CapacitySource
    below: int = 0

    @property
    def known(self) -> int | None:
        """The bytes; None if unknown."""
        return None if self.source is CapacitySource.UNKNOWN else self.bytes


class Pressure:
    """One device's capacity, and what its recorded releases show.

    A run of releases right before a new segment is either a retry of a request that had failed, or the program's
    own ``empty_cache``. It was the program where the request cannot have failed: one of the released segments would
    have served it, or what was reserved before and the new segment together are within what was reserved, or
    reserved and free, at some other time.

    Attributes:
        capacity: memory for the allocator.
        reserved: bytes reserved after each segment event of the device.
    """

    def __init__(self, events: DeviceEvents, start: Sequence[Segment]) -> None:
        """Look at the device's segment events; ``start`` is its state before the first."""
        before = sum(segment["total_size"] for segment in start)
        kinds, sizes = events.kinds, events.sizes
        self._at = np.flatnonzero(events.of_segments)
        grown = (kinds[self._at] == EventKind.SEGMENT_ALLOC) | (kinds[self._at] == EventKind.SEGMENT_MAP)
        change = np.where(grown, sizes[self._at], -sizes[self._at])
        self._held = np.concatenate([[before], before + np.cumsum(change)])
        self.peak_reserved = int(self._held.max())
        self._limits = self._failed_limits(events)
        self._retries = self._possible_retries(events)
        self._collects = recorded_config(events.trace).garbage_collection_threshold > 0
        self.capacity = self._capacity(events)

    def _failed_limits(self, events: DeviceEvents) -> NDArray[np.int64]:
        """Reserved and free bytes at each request that failed."""
        failed = np.flatnonzero(events.kinds == EventKind.OOM)
        limits: NDArray[np.int64] = self._held[np.searchsorted(self._at, failed)] + events.addresses[
            failed
        ].astype(np.int64)
        return limits

    def _possible_retries(self, events: DeviceEvents) -> dict[int, int]:
        """For each run of releases that a new segment follows at once: what did not fit, by its first position."""
        found: dict[int, int] = {}
        kinds, at = events.kinds[self._at], self._at
        enough = max(self.peak_reserved, int(self._limits.max(initial=0)))
        releases = (kinds == EventKind.SEGMENT_FREE) | (kinds == EventKind.SEGMENT_UNMAP)
        for index in np.flatnonzero(releases).tolist():
            if index and releases[index - 1] and at[index] == at[index - 1] + 1:
                continue
            end = index
            while end < len(at) and releases[end] and at[end] == at[index] + end - index:
                end += 1
            if end < len(at) and at[end] == at[index] + end - index:
                wanted = int(self._held[index]) + int(events.sizes[at[end]])
                if wanted > enough and not self._cache_served(events, at[index:end], int(at[end])):
                    found[int(at[index])] = wanted
        return found

    @staticmethod
    def _cache_served(events: DeviceEvents, released: NDArray[np.intp], grown: int) -> bool:
        """Whether the request behind the segment taken at ``grown`` would have fitted into what was released."""
        if recorded_config(events.trace).max_split_size is not None:
            return False  # large cached segments are kept from smaller requests
        if grown + 1 >= len(events.kinds) or events.kinds[grown + 1] != EventKind.ALLOC:
            return False
        request = int(events.sizes[grown + 1])
        whole = released[events.kinds[released] == EventKind.SEGMENT_FREE]
        same = whole[events.streams[whole] == events.streams[grown]]
        sizes = events.sizes[same]
        small = request <= SMALL_REQUEST
        return bool(((sizes >= request) & ((sizes == SMALL_SEGMENT) == small)).any())

    def _capacity(self, events: DeviceEvents) -> Capacity:
        limit = int(self._limits.max(initial=0))
        for device in events.trace.devices:
            if device.index == events.device and device.total_bytes:
                usable = max(0, device.total_bytes - device.context_bytes)
                if not self.peak_reserved <= limit < usable:  # others hold memory of the card too
                    return Capacity(bytes=usable, source=CapacitySource.CARD)
        if limit:
            return Capacity(bytes=limit, source=CapacitySource.OOM)
        if self._retries:
            return Capacity(
                bytes=self.peak_reserved, source=CapacitySource.RETRIES, below=min(self._retries.values())
            )
        return Capacity(bytes=0, source=CapacitySource.UNKNOWN)

    def asked_for(self, position: int) -> bool:
        """Whether the releases that begin at ``position`` cannot be a retry, so that the program called for them."""
        return position not in self._retries and not self._collects
