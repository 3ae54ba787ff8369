"""What the allocator sees of CUDA: physical memory that runs out, and addresses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from vramfit.units import MIB

PAGE_BYTES = 2 * MIB
"""Physical memory is handed out in pages of 2 MiB (cuMemGetAllocationGranularity on every current card)."""

CUDA_MALLOC_TOP = 0x7F80_0000_0000
"""End of the first range that `Driver.malloc` gives, where CUDA places its allocations on Linux."""

ENDLESS = 16 << 40
"""Memory of a card without a limit. Blocks have addresses of 48 bits, and each expandable segment takes 9/8 of it."""

REGIONS = 4
"""Regions of addresses that a `ScatteredDriver` has."""

_REGION_BYTES = 4 << 40
"""What lies between their tops."""

_BOTTOM = CUDA_MALLOC_TOP - REGIONS * _REGION_BYTES
"""Where the lowest of them ends."""

RESERVATION_BASE = 0x10_0000_0000
"""First address that `Driver.reserve` gives: reservations lie apart from cudaMalloc's."""


class _AddressSpace:
    """Hands out the lowest free range of addresses (or of depths below a top), all sizes in whole pages."""

    def __init__(self, base: int) -> None:
        self._holes: list[tuple[int, int]] = []  # (address, size) of the gaps below `_end`, by address
        self._end = base

    def take(self, size: int) -> int:
        for index, (address, room) in enumerate(self._holes):
            if room >= size:
                if room == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (address + size, room - size)
                return address
        address = self._end
        self._end += size
        return address

    def give_back(self, address: int, size: int) -> None:
        holes = self._holes
        index = bisect_left(holes, (address, 0))
        if index < len(holes) and holes[index][0] == address + size:
            size += holes.pop(index)[1]
        if index and sum(holes[index - 1]) == address:
            index -= 1
            before, room = holes.pop(index)
            address, size = before, size + room
        if address + size == self._end:
            self._end = address
        else:
            insort(holes, (address, size))


class Driver:
    """One card's memory: cudaMalloc and cudaFree, and cuMem* for expandable segments.

    Addresses are deterministic and on a 2 MiB boundary. Those of cudaMalloc fall: each range lies right below the
    one before it, as Linux maps memory. In recordings of fresh programs on an H100, 98 or 99 of 100 new segments of
    20 MiB lie lower than the one before; once segments have been given back, the order is mixed. It matters
    because the caching allocator takes the lowest of equal free blocks. Reservations rise.

    Physical memory is counted in whole pages, so that only the page counts, never the address space, decide
    whether a request succeeds.

    Args:
        total_bytes: memory of the card as ``cudaMemGetInfo`` reports it.
        outside_bytes: what is taken before PyTorch allocates: the CUDA context, NCCL, other processes.

    Attributes:
        ceiling: bytes that can be had in place of ``total_bytes``, which the program is told all the same; None for
            those of the card.
    """

    def __init__(self, total_bytes: int, outside_bytes: int = 0) -> None:
        if total_bytes <= 0 or outside_bytes < 0:
            raise ValueError(f"a card of {total_bytes} bytes with {outside_bytes} taken makes no sense")
        self.total_bytes = total_bytes
        self.outside_bytes = outside_bytes
        self.ceiling: int | None = None
        self.mapped_bytes = 0
        self._depths = _AddressSpace(0)  # below CUDA_MALLOC_TOP
        self._reservations = _AddressSpace(RESERVATION_BASE)

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds, as the first figure of ``cudaMemGetInfo``; never negative."""
        return max(0, self.total_bytes - self.outside_bytes - self.mapped_bytes)

    @property
    def process_bytes(self) -> int:
        """Bytes that NVML shows for this process: what the allocator holds and what lies outside it."""
        return self.outside_bytes + self.mapped_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes that can be had in all, what lies outside PyTorch included."""
        return self.total_bytes if self.ceiling is None else self.ceiling

    def has(self, size: int) -> bool:
        """Whether ``size`` more bytes can be had."""
        return self.mapped_bytes + size <= self.most_bytes - self.outside_bytes

    def _claim(self, size: int) -> bool:
        if self.mapped_bytes + size > self.most_bytes - self.outside_bytes:
            return False
        self.mapped_bytes += size
        return True

    def malloc(self, size: int) -> int | None:
        """Allocate ``size`` bytes as ``cudaMalloc`` does: the address, or None when memory runs out."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        if not self._claim(pages):
            return None
        return CUDA_MALLOC_TOP - self._depths.take(pages) - pages

    def free(self, address: int, size: int) -> None:
        """Give back an allocation of `malloc`, with the size it was asked for."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        self.mapped_bytes -= pages
        self._depths.give_back(CUDA_MALLOC_TOP - address - pages, pages)

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory (``cuMemAddressReserve``); the address of the range."""
        return self._reservations.take(-(-size // PAGE_BYTES) * PAGE_BYTES)

    def release(self, address: int, size: int) -> None:
        """Give back a reservation (``cuMemAddressFree``); everything in it has to be unmapped before."""
        self._reservations.give_back(address, -(-size // PAGE_BYTES) * PAGE_BYTES)

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002  a recorded driver looks at the address
        """Put memory behind a reserved range (``cuMemCreate``, ``cuMemMap``): all of it, or False."""
        return self._claim(-(-size // PAGE_BYTES) * PAGE_BYTES)

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002
        """Take the memory from behind a mapped range (``cuMemUnmap``, ``cuMemRelease``)."""
        self.mapped_bytes -= -(-size // PAGE_BYTES) * PAGE_BYTES


class ScatteredDriver(Driver):
    """A card whose allocations of `malloc` come from several regions of addresses.

    As in recordings of an H100 and an H200: which region an allocation comes from differs from process to process,
    since it depends on what else was mapped there. A region's first hole that is wide enough serves, else its end.

    Args:
        draw: gives the region of each allocation, from 0 to less than `REGIONS`.
        rising: addresses of a region rise from one allocation to the next; on cards most fall.
    """

    def __init__(
        self, total_bytes: int, outside_bytes: int = 0, *, draw: Callable[[], int], rising: bool = False
    ) -> None:
        super().__init__(total_bytes, outside_bytes)
        self._draw = draw
        self._rising = rising
        self._regions = [_AddressSpace(number * _REGION_BYTES) for number in range(REGIONS)]

    def malloc(self, size: int) -> int | None:
        """Allocate ``size`` bytes in one of the regions: the address, or None when memory runs out."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        if not self._claim(pages):
            return None
        depth = self._regions[self._draw()].take(pages)
        return _BOTTOM + depth if self._rising else CUDA_MALLOC_TOP - depth - pages

    def free(self, address: int, size: int) -> None:
        """Give back an allocation of `malloc`, with the size it was asked for."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        self.mapped_bytes -= pages
        depth = address - _BOTTOM if self._rising else CUDA_MALLOC_TOP - address - pages
        self._regions[depth // _REGION_BYTES].give_back(depth, pages)
