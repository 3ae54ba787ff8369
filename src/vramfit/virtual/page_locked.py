"""Which tensors of the host lie in pinned memory, which copies to and from a card pass faster."""

from __future__ import annotations

import weakref

import torch

from vramfit.virtual.machine import Machine


class _Pinned(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("handle", "key")

    key: int
    handle: int


class PageLocked:
    """Storages of the host that count as pinned, each for as long as it lives."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._pinned: dict[int, _Pinned] = {}
        self._stand_ins: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = (
            weakref.WeakKeyDictionary()
        )

    def pin(self, tensor: torch.Tensor) -> None:
        """Count a real CPU tensor's storage as pinned."""
        if self._machine.init_pid is None:
            torch.cuda._lazy_init()  # CUDA pins it
        storage = tensor.untyped_storage()

        def unpin(pinned: weakref.ref[torch.UntypedStorage]) -> None:
            assert isinstance(pinned, _Pinned)
            if self._pinned.pop(pinned.key, None) is not None:
                self._machine.unpin(pinned.handle)

        pinned = _Pinned(storage, unpin)
        pinned.key = storage._cdata
        pinned.handle = self._machine.pin(storage.nbytes())
        self._pinned[pinned.key] = pinned

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor's storage counts as pinned."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._pinned or storage in self._stand_ins

    def stand_for(self, storage: torch.UntypedStorage, real: torch.UntypedStorage) -> None:
        """Let a virtual storage count as pinned that stands for a real one, which lives as long."""
        self._stand_ins[storage] = real
