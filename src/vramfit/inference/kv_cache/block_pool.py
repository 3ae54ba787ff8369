"""Which blocks of a pool are free, and how many hold each of the others."""

from __future__ import annotations

from vramfit.errors import CacheFullError


class BlockPool:
    """Blocks by number, with a count of those who hold each.

    >>> pool = BlockPool(2)
    >>> first = pool.take()
    >>> pool.share(first)
    >>> pool.release(first), pool.release(first)
    (False, True)
    >>> pool.free
    2

    Args:
        blocks: how many there are.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.most_used = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - len(self._free)

    def check(self, needed: int) -> None:
        """See that so many blocks are free.

        Raises:
            CacheFullError: they are not; nothing has changed.
        """
        if needed > self.free:
            raise CacheFullError(
                f"the key-value cache is full: {needed} blocks are needed, {self.free} of {self.blocks} are free",
                "Give it a larger budget, fewer sequences or shorter ones, or host memory to spill to",
            )

    def take(self) -> int:
        """A free block, held once.

        Raises:
            CacheFullError: there is none.
        """
        if not self._free:
            self.check(1)
        block = self._free.pop()
        self._holders[block] = 1
        self.most_used = max(self.most_used, self.used)
        return block

    def share(self, block: int) -> None:
        """Hold a block once more."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free")
        self._holders[block] += 1

    def release(self, block: int) -> bool:
        """Hold a block once less; says whether it is free now."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free already")
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        self._free.append(block)
        return True

    def holders(self, block: int) -> int:
        """How often a block is held."""
        return self._holders[block]
