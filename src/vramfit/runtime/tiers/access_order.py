"""Learns in which order tensors are asked for, so that the next ones can be brought before."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Follower:
    key: Hashable
    sure: bool


class AccessOrder:
    """What followed each key the last time, thread by thread; believed after it was seen twice in a row."""

    def __init__(self) -> None:
        self._followers: dict[Hashable, _Follower] = {}
        self._last: dict[int, Hashable] = {}

    def note(self, thread: int, key: Hashable) -> None:
        """A thread asks for a key."""
        before, self._last[thread] = self._last.get(thread), key
        if before is None or before == key:
            return
        known = self._followers.get(before)
        if known is None or known.key != key:
            self._followers[before] = _Follower(key, sure=False)
        else:
            known.sure = True

    def after(self, key: Hashable, count: int) -> Iterator[Hashable]:
        """The keys that are expected next, at most so many; ends where it is not sure."""
        start = key
        for _ in range(count):
            known = self._followers.get(key)
            if known is None or not known.sure or known.key == start:
                return
            key = known.key
            yield key

    def forget(self, key: Hashable) -> None:
        """A key is gone."""
        self._followers.pop(key, None)
        for before in [one for one, known in self._followers.items() if known.key == key]:
            del self._followers[before]
        for thread in [one for one, last in self._last.items() if last == key]:
            del self._last[thread]
