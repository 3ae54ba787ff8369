"""A tier that is one tensor from the start: no allocator is asked later, and its holes are closed by moving tensors.

NOTE [Handles that stay]: a handle says where its values are now; the store asks it each time. A tensor that somebody
holds cannot be moved. Each has a storage of its own over its part of the pool (by DLPack), so that torch counts who
holds it. Tensors of a virtual GPU cannot be exported so; there only leases keep a tensor in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vramfit.runtime.tiers.memory_tiers import ALONE, DEVICE_BLOCK, holders, rounded
from vramfit.runtime.tiers.offsets import Offsets
from vramfit.runtime.tiers.tier import Copy, Layout, NoRoom, Tier


@dataclass(slots=True, eq=False)
class _Part:
    """A tensor in the pool.

    Attributes:
        begin: where its part begins.
        size: of the part.
        layout: of its values.
        tensor: over them.
        alone: what `holders` says of the tensor when nobody else holds it: it is a view of what was exported.
        counted: writes before it was moved.
    """

    begin: int
    size: int
    layout: Layout
    tensor: torch.Tensor
    alone: int = ALONE
    counted: int = 0


class PoolTier(Tier):
    """A preallocated tier.

    Args:
        name: such as ``"device"``.
        capacity: bytes that are taken at once.
        device: where.
        pinned: whether it is page-locked memory of the host.

    Attributes:
        moved: tensors that were moved to close holes.
    """

    def __init__(self, name: str, capacity: int, device: torch.device, *, pinned: bool = False) -> None:
        super().__init__(name, capacity // DEVICE_BLOCK * DEVICE_BLOCK)
        self._pool = torch.empty(self.capacity, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._offsets = Offsets(self.capacity)
        self._parts: list[_Part] = []
        self._left: list[_Part] = []  # of tensors that are no longer the store's, and that somebody holds
        self._exports = True
        self.moved = 0

    def price(self, nbytes: int) -> int:
        """See `Tier`."""
        return rounded(nbytes, DEVICE_BLOCK)

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """See `Tier`."""
        layout = Layout.of(source)
        size = self.price(layout.nbytes)
        begin = self._take(size)
        try:
            part = _Part(begin, size, layout, self._over(begin, layout))
            part.alone = holders(part.tensor)
            copy(source, part.tensor)
        except BaseException:
            self._offsets.give(begin, size)
            raise
        self._parts.append(part)
        return part

    def get(self, handle: Any) -> torch.Tensor:
        """See `Tier`."""
        found: torch.Tensor = handle.tensor
        return found

    def drop(self, handle: Any) -> None:
        """See `Tier`."""
        self._parts.remove(handle)
        self._left.append(handle)
        self._sweep()

    def held(self, handle: Any) -> bool:
        """See `Tier`."""
        return self._exports and holders(handle.tensor) > handle.alone

    def version(self, handle: Any) -> int:
        """See `Tier`."""
        return int(handle.counted + handle.tensor._version)

    def close(self) -> None:
        """See `Tier`."""
        self._parts.clear()
        self._left.clear()
        self._pool = self._pool[:0].clone()

    # -- within --------------------------------------------------------------------------------------------------

    def _over(self, begin: int, layout: Layout) -> torch.Tensor:
        flat = self._pool[begin : begin + layout.nbytes]
        if not layout.nbytes:
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=flat.device)
        if self._exports:
            try:
                flat = torch.utils.dlpack.from_dlpack(flat)
            except NotImplementedError:  # a virtual GPU
                self._exports = False
        return layout.over(flat)

    def _sweep(self) -> None:
        """Give back the parts that nobody holds any more."""
        held = []
        for part in self._left:
            if self.held(part):
                held.append(part)
            else:
                self._offsets.give(part.begin, part.size)
        self._left = held

    def _take(self, size: int) -> int:
        if not size:
            return 0
        self._sweep()
        begin = self._offsets.take(size)
        if begin is None and self._offsets.free >= size:
            self._close_holes()
            begin = self._offsets.take(size)
        if begin is None:
            raise NoRoom
        return begin

    def _close_holes(self) -> None:
        """Move what may be moved towards the begin, in order."""
        movable = self.movable()
        offsets = Offsets(self.capacity)
        stay = [part for part in self._parts if id(part) not in movable and part.size]
        for part in (*stay, *self._left):
            if part.size:
                offsets.take_at(part.begin, part.size)
        for part in sorted((one for one in self._parts if id(one) in movable), key=lambda one: one.begin):
            if not part.size:
                continue
            begin = offsets.first_before(part.begin, part.size)
            if begin is None:
                offsets.take_at(part.begin, part.size)
                continue
            offsets.take_at(begin, part.size)
            self._move(part, begin)
        self._offsets = offsets

    def _move(self, part: _Part, begin: int) -> None:
        """Copy towards the begin, in steps that do not reach into what is still to be copied."""
        distance = part.begin - begin
        with torch.no_grad():
            for done in range(0, part.layout.nbytes, distance):
                count = min(distance, part.layout.nbytes - done)
                source = self._pool[part.begin + done : part.begin + done + count]
                self._pool[begin + done : begin + done + count].copy_(source)
        counted = self.version(part)
        part.begin, part.tensor = begin, self._over(begin, part.layout)
        part.alone = holders(part.tensor)
        part.counted = counted - part.tensor._version
        self.moved += 1
