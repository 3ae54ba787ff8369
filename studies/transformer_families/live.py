"""Bytes of the tensors alive at once, for real on the CPU and on the virtual GPU, to be set side by side."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramfit.trace import EventKind, MemoryTrace


class LiveBytes(TorchDispatchMode):
    """Sums the storages that operators create, for as long as they live.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self._known:
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self.live += size
        self._known.add(key)

        def gone() -> None:
            self.live -= size
            self._known.discard(key)

        weakref.finalize(storage, gone)


def requested_peak(trace: MemoryTrace, start: int) -> int:
    """Most bytes that tensors born since an event had requested at once.

    Without what only a card has: workspaces, and temporaries inside kernels.

    Args:
        trace: of the virtual GPU.
        start: the first event that counts.
    """
    live: dict[int, int] = {}
    total = peak = 0
    for row in range(start, len(trace)):
        kind, address = trace.kind[row], int(trace.address[row])
        if kind == EventKind.ALLOC and trace.tensor[row] >= 0:
            live[address] = int(trace.size[row])
            total += live[address]
            peak = max(peak, total)
        elif kind == EventKind.FREE_REQUESTED:
            total -= live.pop(address, 0)
    return peak
