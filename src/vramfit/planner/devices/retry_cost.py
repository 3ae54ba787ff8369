"""What a step of a virtual card costs beyond its operations: caches that are emptied since no memory is left.

NOTE [Retries]: where the driver has no memory left, torch's allocator gives all cached segments back and asks anew
(c10/cuda/CUDACachingAllocator.cpp, ``release_cached_blocks``). Each ``cudaFree`` waits for the card, and until the
segments are there again the card has nothing to do. A program that fits in this way alone does so in every step. The
simulated clock knows operations only, so that such a step looks free.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.allocator import CachingAllocator

CALL_SECONDS = 0.5e-3
"""Estimated seconds of a ``cudaMalloc`` or ``cudaFree`` of a large segment, during which the card waits.

M. Boyer, "Memory Allocation Overhead" (University of Virginia), measured 0.05 ms up to 512 KiB and rising times beyond,
to milliseconds for hundreds of MiB. Not measured on newer cards.
"""


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """Calls of the driver so far.

    Attributes:
        retries: how often the whole cache was given back.
        calls: of ``cudaMalloc`` and ``cudaFree``, and of mapping and unmapping pages.
    """

    retries: int
    calls: int

    @classmethod
    def of(cls, allocator: CachingAllocator) -> DriverCalls:
        """What an allocator has done so far."""
        stats = allocator.memory_stats_flat()
        return cls(stats["num_alloc_retries"], stats["num_device_alloc"] + stats["num_device_free"])

    def since(self, before: DriverCalls) -> DriverCalls:
        """What came since then."""
        return DriverCalls(self.retries - before.retries, self.calls - before.calls)

    @property
    def seconds(self) -> float:
        """What they cost where the cache was given back. What the first steps take anew is taken once."""
        return self.calls * CALL_SECONDS if self.retries else 0.0
