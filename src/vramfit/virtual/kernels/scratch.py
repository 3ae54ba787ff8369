"""The order in which a kernel takes and gives back its temporaries, written as it reads in torch's C++."""

from __future__ import annotations

from vramfit.virtual.kernels.context import Extras, given_back


class Scratch:
    """Blocks of one kernel in order of time; those not given back live until it returns.

    A size of 0 takes no block: it stands for a tensor that was not needed.
    """

    __slots__ = ("_entries", "_taken", "above", "below")

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._taken = 0
        self.above = 0
        self.below = 0

    def take(self, nbytes: int) -> int:
        """Take a block; returns its number, 0 for none."""
        if nbytes <= 0:
            return 0
        self._entries.append(nbytes)
        self._taken += 1
        return self._taken

    def give(self, *blocks: int) -> None:
        """Give blocks back, in this order."""
        self._entries.extend(given_back(block) for block in blocks if block)

    def use(self, nbytes: int) -> None:
        """Take a block and give it back before the next one: storage of a library call."""
        self.give(self.take(nbytes))

    def doubt(self, error: tuple[int, int]) -> None:
        """Widen the error bar: how many bytes more and how many fewer a block may have.

        One block at a time decides the peak, so the widest counts.
        """
        self.above = max(self.above, error[0])
        self.below = max(self.below, error[1])

    @property
    def entries(self) -> tuple[int, ...]:
        """What `Extras` lists."""
        return tuple(self._entries)


def sequence(before: Scratch | None = None, after: Scratch | None = None) -> Extras | None:
    """Extras of blocks taken before and after an op's outputs; None when there are none."""
    parts = [part for part in (before, after) if part is not None]
    above, below = max(p.above for p in parts), max(p.below for p in parts)
    first = before.entries if before is not None else ()
    second = after.entries if after is not None else ()
    if not (first or second or above or below):
        return None
    return Extras(before=first, after=second, error_bytes=above, error_below_bytes=below)
