"""Which ranges of one piece of memory are taken: best fit, with holes that join."""

from __future__ import annotations

import bisect


class Offsets:
    """Ranges of a piece of memory.

    Args:
        size: of the piece.

    Attributes:
        size: of the piece.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # begin and end, in order

    @property
    def free(self) -> int:
        """What is not taken, in all holes together."""
        return sum(end - begin for begin, end in self._holes)

    @property
    def largest(self) -> int:
        """The largest hole."""
        return max((end - begin for begin, end in self._holes), default=0)

    def take(self, size: int) -> int | None:
        """The begin of a range, in the smallest hole that it fits; None where it fits none."""
        fitting = [(end - begin, begin) for begin, end in self._holes if end - begin >= size]
        if not fitting:
            return None
        _, begin = min(fitting)
        self.take_at(begin, size)
        return begin

    def take_at(self, begin: int, size: int) -> None:
        """Take a range that is free."""
        at = bisect.bisect_right(self._holes, (begin, self.size + 1)) - 1
        start, end = self._holes.pop(at)
        left = [(start, begin)] if start < begin else []
        right = [(begin + size, end)] if begin + size < end else []
        self._holes[at:at] = [*left, *right]

    def give(self, begin: int, size: int) -> None:
        """Give a range back."""
        if not size:
            return
        end = begin + size
        at = bisect.bisect_left(self._holes, (begin, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == begin:
            begin = self._holes.pop(at - 1)[0]
            at -= 1
        self._holes.insert(at, (begin, end))

    def first_before(self, begin: int, size: int) -> int | None:
        """Where a range that begins there (and is free or its own) could begin earlier; None where nowhere."""
        for start, end in self._holes:
            if start >= begin:
                return None
            if end - start >= size:
                return start
        return None
