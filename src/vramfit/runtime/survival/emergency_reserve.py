"""Memory of a card that is kept back, so that the optimizer's step finds room whatever else was taken meanwhile.

NOTE [A pool and what fills it]: torch has a last resort, ``torch.cuda.MemPool(use_on_oom=True)``: where the driver
gives no memory, a request outside of the pool is served from what is free in it (c10/cuda/CUDACachingAllocator.cpp,
``try_mempool_fallback``). By itself that is no reserve for anybody: the first shortage takes it, be it in the forward
pass, and even before cached memory is released (github.com/pytorch/pytorch/pull/169699). So one tensor fills the pool.
It goes for the time of the optimizer's step, and only then the pool has anything to give. Afterwards the tensor takes
its place again. A pool in use keeps its memory when the cache is emptied, and no neighbour gets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.runtime.survival.leftovers import memory_now, release_memory
from vramfit.units import format_bytes


class EmergencyReserve:
    """Bytes of a card that only the optimizer's step may take. See NOTE [A pool and what fills it].

    Args:
        nbytes: how many; what a slice's copies and the step's temporaries take.
        device: a card.

    Attributes:
        nbytes: as given.

    Raises:
        UsageError: the device is no card of CUDA, or has no room for it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(
                f"a reserve is kept on a card of CUDA, and the model is on {device}",
                "Leave reserve out, or move the model to the card first",
            )
        self.nbytes, self._device = nbytes, device
        with torch.cuda.device(device):  # a pool is its current device's
            self._pool: Any = torch.cuda.MemPool(use_on_oom=True)
        self._filling: torch.Tensor | None = None
        self._lost = False
        release_memory(device)  # until torch 2.12 requests in a pool release no cached memory
        try:
            self._filling = self._taken()
        except torch.OutOfMemoryError:
            found = memory_now(device)
            self.close()
            raise UsageError(
                f"there is no room for a reserve of {format_bytes(nbytes)}: {found}", "Make it smaller"
            ) from None

    @property
    def held(self) -> bool:
        """Whether it is whole, and nobody can take it."""
        return self._filling is not None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The time in which requests that find no other room are served from it."""
        self._filling = None
        try:
            yield
        finally:
            self.refill()

    def refill(self) -> bool:
        """Keep it back again; whether it is whole.

        What the step made and keeps may lie in it, such as states of the optimizer's first step. Then as much is taken
        anew, as soon as it is free.
        """
        if self._filling is not None or self._pool is None:
            return self.held
        if self._lost:  # a request that is known to fail would have all cached memory released first
            now = memory_now(self._device)
            assert now is not None
            if now.free < self.nbytes and not self._whole():
                return False
        with contextlib.suppress(torch.OutOfMemoryError):
            self._filling = self._taken()
        self._lost = not self.held
        return self.held

    def close(self) -> None:
        """Give it back to torch's allocator and the driver, but for what is in use."""
        self._filling = self._pool = None

    def _taken(self) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)

    def _whole(self) -> bool:
        """Whether a free block of the pool has room for all of it."""
        blocks = (block for segment in self._pool.snapshot() for block in segment["blocks"])
        return any(block["state"] == "inactive" and block["size"] >= self.nbytes for block in blocks)
