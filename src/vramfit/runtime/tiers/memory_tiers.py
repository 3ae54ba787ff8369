"""Tiers of memory that torch allocates tensor by tensor: a device, a peer, and the host's pinned memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from vramfit.runtime.tiers.tier import Copy, Layout, NoRoom, Tier
from vramfit.torch_internals.autograd_engine import storage_use_count

DEVICE_BLOCK = 512
"""The caching allocator rounds requests up to it (kMinBlockSize, c10/core/CachingDeviceAllocator.h)."""


def rounded(nbytes: int, block: int) -> int:
    """The next multiple of a block."""
    return -(-nbytes // block) * block


ALONE = 2
"""What `holders` gives for a tensor whose memory nobody else holds."""


def holders(tensor: torch.Tensor) -> int:
    """How many hold a tensor's memory: tensors, views and graphs over its storage, and the Python object asked here.

    ``torch._C._storage_Use_Count`` counts them, as torch's CUDA graph trees do (torch/_inductor/cudagraph_trees.py).
    """
    storage = tensor.untyped_storage()
    return int(storage_use_count(storage._cdata))


class DeviceTier(Tier):
    """Memory of a card, or of the CPU where the store's device is the CPU.

    Args:
        name: such as ``"device"`` or ``"peer"``.
        capacity: most bytes, blocks of 512 counted as the caching allocator does.
        device: which.
    """

    def __init__(self, name: str, capacity: int, device: torch.device) -> None:
        super().__init__(name, capacity)
        self.device = device

    def price(self, nbytes: int) -> int:
        """See `Tier`."""
        return rounded(nbytes, DEVICE_BLOCK)

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """See `Tier`."""
        layout = Layout.of(source)
        try:
            target = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.device)
        except torch.OutOfMemoryError as error:  # others on the card have what the budget would allow
            raise NoRoom from error
        copy(source, target)
        return target

    def get(self, handle: Any) -> torch.Tensor:
        """See `Tier`."""
        found: torch.Tensor = handle
        return found

    def drop(self, handle: Any) -> None:
        """See `Tier`: the last to hold it lets go."""

    def adopt(self, tensor: torch.Tensor) -> Any | None:
        """See `Tier`."""
        # A view keeps its base, so that it would never be the only one.
        if tensor.device != self.device or tensor.storage_offset() or tensor._base is not None:
            return None
        alone = rounded(tensor.untyped_storage().nbytes(), DEVICE_BLOCK) == self.price(tensor.nbytes)
        return tensor.detach() if alone else None

    def held(self, handle: Any) -> bool:
        """See `Tier`."""
        return holders(handle) > ALONE


class PinnedTier(Tier):
    """Page-locked memory of the host, from which a card copies at full speed beside its computation.

    NOTE [Blocks that stay]: torch's allocator of pinned memory rounds a request up to a power of two, and a block that
    is given back stays with it and serves only requests that round to the same size (aten/src/ATen/core/
    CachingHostAllocator.h). So what counts here is the rounded size, and of blocks that are free too: they are kept in
    this class, which asks torch for another size only after it gave back others.

    Args:
        capacity: most bytes, as rounded.
        round_limit: ``pinned_max_round_threshold_mb`` in bytes, above which nothing is rounded; None where it is unset.
        pinned: whether there is a card to pin memory for; plain memory is counted alike.
    """

    def __init__(self, capacity: int, *, pinned: bool, round_limit: int | None = None) -> None:
        super().__init__("pinned", capacity)
        self._round_limit, self._pinned = round_limit, pinned
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.reserved = 0

    def price(self, nbytes: int) -> int:
        """See `Tier`."""
        if self._round_limit is not None and nbytes > self._round_limit:
            return nbytes
        return 1 << (nbytes - 1).bit_length() if nbytes else 0

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """See `Tier`."""
        size = self.price(source.nbytes)
        block = self._take(size)
        handle = block, Layout.of(source)
        try:
            copy(source, self.get(handle))
        except BaseException:
            self._free[size].append(block)
            raise
        return handle

    def get(self, handle: Any) -> torch.Tensor:
        """See `Tier`."""
        block, layout = handle
        found: torch.Tensor = layout.over(block)
        return found

    def drop(self, handle: Any) -> None:
        """See `Tier`."""
        block, _ = handle
        self._free[block.numel()].append(block)

    def close(self) -> None:
        """See `Tier`."""
        self._give_back()

    def _take(self, size: int) -> torch.Tensor:
        if self._free[size]:
            return self._free[size].pop()
        if self.reserved + size > self.capacity:
            self._give_back()
        if self.reserved + size > self.capacity:
            raise NoRoom
        made = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.reserved += size
        return made

    def _give_back(self) -> None:
        self.reserved -= sum(size * len(blocks) for size, blocks in self._free.items())
        self._free.clear()
        if self._pinned:
            torch.accelerator.empty_host_cache()
