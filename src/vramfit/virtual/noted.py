"""Facts that follow the storage of a fake tensor, and are gone with it."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

Fact = TypeVar("Fact")


class _Note(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("fact", "key")

    key: int
    fact: Any


class Noted(Generic[Fact]):
    """A fact of each of some storages. Views share their storage, so they share the fact."""

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}

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
