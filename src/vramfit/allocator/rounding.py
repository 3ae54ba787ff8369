"""How large a block and a segment a request takes."""

from __future__ import annotations

from vramfit.allocator.config import ROUNDUP_INTERVALS, AllocatorConfig
from vramfit.units import MIB

MIN_BLOCK = 512
"""Blocks are multiples of this (c10/core/AllocatorConfig.h, ``kMinBlockSize``)."""

SMALL_REQUEST = 1 * MIB
"""Largest rounded request of the small pool (``kSmallSize``)."""

SMALL_SEGMENT = 2 * MIB
"""Segment, and page of expandable segments, of the small pool (``kSmallBuffer``)."""

MIN_LARGE_REQUEST = 10 * MIB
"""Requests from here on get a segment of their own size (``kMinLargeAlloc``)."""

LARGE_ROUNDING = 2 * MIB
"""... rounded up to this (``kRoundLarge``)."""


class Rounding:
    """The two roundings under one configuration.

    Attributes:
        plain: no power-of-two divisions are set, so blocks are multiples of 512 bytes.
    """

    __slots__ = ("_divisions", "_large_segment", "plain")

    def __init__(self, config: AllocatorConfig) -> None:
        self._divisions = config.roundup_power2_divisions
        self._large_segment = config.large_segment_size
        self.plain = max(self._divisions) <= 1

    def block(self, size: int) -> int:
        """Bytes of the block for a request (c10/cuda/CUDACachingAllocator.cpp, ``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if not self.plain:
            # The interval of 1 MiB also serves everything below it, the last one everything above.
            interval = min(max(size.bit_length() - 21, 0), ROUNDUP_INTERVALS - 1)
            divisions = self._divisions[interval]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                return _next_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment(self, rounded: int) -> int:
        """Bytes to ask the driver for when no cached block serves (``get_allocation_size``)."""
        if rounded <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE_REQUEST:
            return self._large_segment
        return -(-rounded // LARGE_ROUNDING) * LARGE_ROUNDING


def _next_division(size: int, divisions: int) -> int:
    """The next of the equal steps between two powers of two (``roundup_power2_next_division``)."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size // step) * step
