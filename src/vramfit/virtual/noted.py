"""Facts that follow the storage of a tensor, and are gone with it; one of them is that it counts as page-locked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from vramfit.torch_internals.cuda_device import initialize
from vramfit.virtual.machine import Machine

Fact = TypeVar("Fact")


class _Note(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("fact", "key")

    key: int
    fact: Any


class Noted(Generic[Fact]):
    """A fact of each of some storages. Views share their storage, so they share the fact.

    Args:
        gone: called with the fact of each storage that has died.
    """

    def __init__(self, gone: Callable[[Fact], object] | None = None) -> None:
        self._notes: dict[int, _Note] = {}
        self._gone = gone

    def __len__(self) -> int:
        return len(self._notes)

    def find(self, tensor: torch.Tensor) -> Fact | None:
        """The fact of a tensor's storage; None without one."""
        if not self._notes or tensor.layout is not torch.strided:
            return None
        note = self._notes.get(tensor.untyped_storage()._cdata)
        return None if note is None else note.fact

    def set(self, tensor: torch.Tensor, fact: Fact) -> None:
        """Note a fact of a (strided) tensor's storage in place of what was noted."""
        storage = tensor.untyped_storage()
        note = _Note(storage, self._drop)
        note.key, note.fact = storage._cdata, fact
        self._notes[note.key] = note

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the fact of a tensor's storage."""
        if self._notes and tensor.layout is torch.strided:
            self._notes.pop(tensor.untyped_storage()._cdata, None)

    def _drop(self, note: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(note, _Note)
        if self._notes.get(note.key) is note:
            del self._notes[note.key]
        if self._gone is not None:
            self._gone(note.fact)


class PageLocked:
    """Tensors of the host that lie in page-locked memory, from and to which copies of a card are faster."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._handles: Noted[int] = Noted(machine.unpin)
        self._stand_ins: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = (
            weakref.WeakKeyDictionary()
        )

    def pin(self, tensor: torch.Tensor) -> None:
        """Count a real CPU tensor's storage as page-locked for as long as it lives."""
        if self._machine.init_pid is None:
            initialize()  # CUDA pins it
        self._handles.set(tensor, self._machine.pin(tensor.untyped_storage().nbytes()))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor's storage counts as page-locked."""
        return self._handles.find(tensor) is not None or tensor.untyped_storage() in self._stand_ins

    def stand_for(self, storage: torch.UntypedStorage, real: torch.UntypedStorage) -> None:
        """Let a virtual storage that stands for a real one count as page-locked as long as that one lives."""
        self._stand_ins[storage] = real
