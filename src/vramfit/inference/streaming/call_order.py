"""In which order layers are called, and which are expected next.

NOTE [What comes next]: programs call their layers as they did before. So a place in the calls so far is followed: as
long as what is called is what came there, what came next is expected. Where it is not, the latest place is looked for
at which the last two calls came, or the last one. Before anything is known, layers are expected in the order of their
numbers. A wrong guess costs a copy, and never a value: whoever is called waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator

_KEPT = 4096
"""Calls that are remembered at least: several passes of the deepest models."""


class CallOrder:
    """The calls so far of layers that have numbers.

    Args:
        count: how many layers there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: list[int] = []
        self._at: int | None = None

    def note(self, number: int) -> None:
        """A layer is called."""
        calls, at = self._calls, self._at
        if at is not None and calls[at] == number:
            self._at = at + 1
        else:
            self._at = self._place_of(number)
        calls.append(number)
        if len(calls) >= 2 * _KEPT:
            del calls[:_KEPT]
            self._at = None if self._at is None or self._at < _KEPT else self._at - _KEPT

    def _place_of(self, number: int) -> int | None:
        calls = self._calls
        seen = [at for at, one in enumerate(calls) if one == number]
        for at in reversed(seen):
            if at and calls[at - 1] == calls[-1]:
                return at + 1
        return seen[-1] + 1 if seen else None

    def upcoming(self) -> Iterator[int]:
        """The numbers that are expected, one after another; after those of earlier calls, all in their order."""
        if self._at is not None:
            yield from self._calls[self._at :]
        last = self._calls[-1] if self._calls else -1
        for step in range(1, self._count + 1):
            yield (last + step) % self._count
