"""How many batches are brought ahead: by how long they take to come, how long a step takes, and the memory there is."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

LEAST = 2
"""One batch is used while the next one comes."""

MOST = 16
"""More has no effect: a loader that is late for so many steps is too slow, not uneven."""

_SEEN = 64
"""Batches that are looked back at."""

_SURE_AFTER = 3
"""Steps after which what the device has free is free in every step: states of an optimizer are made in the first."""

_SHARE = 8
"""One more batch may take this part of what is free, so that what others need stays."""


class DepthRule:
    """The depth, revised with each step.

    A queue evens out batches that come late now and then: while the slowest one comes, steps go on with those that are
    there. So as many are wanted as steps pass meanwhile. A loader that is slower than the steps on the average leaves
    any queue empty, and gets the least.

    Args:
        fixed: a depth that was asked for; None lets it be chosen.
        limit: most bytes of batches on the device; None takes it from what is free.
        free: what is free on the device at the moment, in bytes.
    """

    def __init__(self, fixed: int | None, limit: int | None, free: Callable[[], int]) -> None:
        self._fixed, self._limit, self._free = fixed, limit, free
        self._loading: deque[float] = deque(maxlen=_SEEN)
        self._steps: deque[float] = deque(maxlen=_SEEN)
        self._count = 0
        self._largest = 0
        self.depth = fixed or LEAST

    def loaded(self, seconds: float, nbytes: int) -> None:
        """A batch took so long to come, and takes so much."""
        self._loading.append(seconds)
        self._largest = max(self._largest, nbytes)
        if self._limit is not None and self._largest:
            self.depth = max(1, min(self.depth, self._limit // self._largest))

    def stepped(self, seconds: float) -> None:
        """A step took so long, waiting for its batch left out."""
        self._steps.append(seconds)
        self._count += 1
        wanted = self._fixed or self.wanted()
        if self._limit is not None:
            room = self._limit // self._largest if self._largest else wanted
            self.depth = max(1, min(wanted, room))
        elif wanted <= self.depth or self._fixed:
            self.depth = wanted
        elif self._count >= _SURE_AFTER and self._largest <= self._free() // _SHARE:
            self.depth += 1

    def fits(self, live: int, nbytes: int) -> bool:
        """Whether a batch may come beside so many live bytes."""
        return self._limit is None or live + nbytes <= self._limit

    def wanted(self) -> int:
        """The depth by time alone."""
        if not self._steps or not self._loading:
            return LEAST
        if statistics.fmean(self._loading) >= statistics.fmean(self._steps):
            return LEAST
        step = max(statistics.median(self._steps), 1e-6)
        return min(MOST, max(LEAST, 1 + math.ceil(max(self._loading) / step)))
