"""What only reference cycles hold at a moment: found as the garbage collector finds it, and left as it is.

NOTE [Dead memory]
The collector (Python/gc.c, ``subtract_refs`` and ``move_unreachable``) takes from each object's reference count those
that come from other objects which it knows. Where something is left, somebody outside holds the object: a frame that
runs, a C++ owner. These and what they lead to are alive, all else is dead. The same reasoning is done here on copies of
the counts: nothing is collected, no code of the program runs, and no object outlives the search because of it.

torch holds a tensor's Python object for as long as C++ owners share the tensor (one reference, however many they are).
Such a tensor counts as alive. A gradient is the exception: its only C++ owner is its parameter, so that a reference
from the one to the other is added. What the graph of a dead result saved has other owners in C++ that cannot be told
from those of a living graph: the answer is a lower bound, and says where there are such graphs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from vramfit.torch_internals.autograd_engine import storage_use_count
from vramfit.torch_internals.dispatch import DisableTorchFunctionSubclass

MOST_SECONDS = 12.0
"""What all searches of a process may take in all: a program that looks for its largest batch runs out many times."""

_MOST_OBJECTS = 3_000_000
"""Objects beyond which nothing is searched: a search of 300,000 takes 1.5 s."""

_AT_ONCE = 50_000
"""Objects that are asked for their referents in one call, whose answer is one list."""

_GRADIENT_OWNERS = 2
"""Owners of a gradient: its Python object, and its parameter."""


class DeadSearch:
    """Finds what only reference cycles hold, as long as that does not take too long in all.

    Attributes:
        seconds: what all searches took so far.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self.seconds = 0.0
        self._most = most_seconds

    def storages(self) -> DeadStorages | None:
        """The storages of dead tensors; None where that takes, or the searches so far took, more time than there is."""
        if self.seconds >= self._most:
            return None
        began, collects = time.perf_counter(), gc.isenabled()
        gc.disable()  # what is made here must not set off a collection
        try:
            return _dead_storages()
        finally:
            if collects:
                gc.enable()
            self.seconds += time.perf_counter() - began


class DeadStorages(NamedTuple):
    """Storages that only reference cycles hold.

    Attributes:
        addresses: of torch's own objects for them, as ``UntypedStorage._cdata`` gives them.
        saved: storages that only C++ holds, as graphs do what they saved; empty where no dead result has a graph.
    """

    addresses: tuple[int, ...]
    saved: tuple[int, ...]


def _dead_storages() -> DeadStorages | None:
    objects = gc.get_objects()
    if len(objects) > _MOST_OBJECTS:
        return None
    counts = list(map(sys.getrefcount, objects))
    ours = next(map(sys.getrefcount, [object()]))  # what the list and counting itself add to each
    inside = _inner_references(objects)
    tensors = [item for item in objects if issubclass(type(item), torch.Tensor)]
    gradients = list(_gradients(tensors))
    inside.update(id(gradient) for _, gradient in gradients)
    suspects = {
        id(item): item
        for item, count in zip(objects, counts, strict=True)
        if count - ours <= inside[id(item)]
    }
    _revive([item for item in objects if id(item) not in suspects], suspects, gradients)
    with DisableTorchFunctionSubclass():
        dead = [tensor for tensor in tensors if id(tensor) in suspects]
        saved: set[int] = set()
        if any(tensor.grad_fn is not None for tensor in dead):
            saved = {
                item.untyped_storage()._cdata
                for item, count in zip(objects, counts, strict=True)
                if count - ours == 1 and not inside[id(item)] and issubclass(type(item), torch.Tensor)
                if item.layout is torch.strided
            }
        return DeadStorages(addresses=tuple(_held_by(dead)), saved=tuple(saved))


def _gradients(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with its gradient, where nobody else in C++ holds that."""
    with DisableTorchFunctionSubclass():
        for tensor in tensors:
            gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
            if gradient is not None and gradient._use_count() == _GRADIENT_OWNERS:  # type: ignore[attr-defined]
                yield tensor, gradient


def _inner_references(objects: Sequence[object]) -> Counter[int]:
    """How many references each object gets from those that the collector knows, by its ``id``."""
    inside: Counter[int] = Counter()
    for referents in _referents(objects):
        inside.update(map(id, referents))
    return inside


def _revive(
    alive: Sequence[object],
    suspects: dict[int, object],
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Take from the suspects what objects that are alive lead to."""
    while alive:
        reached = [
            referent
            for referents in _referents(alive)
            for referent in referents
            if suspects.pop(id(referent), None) is not None
        ]
        alive = reached or [
            gradient
            for parameter, gradient in gradients
            if id(parameter) not in suspects and suspects.pop(id(gradient), None) is not None
        ]


def _referents(objects: Sequence[object]) -> Iterator[list[Any]]:
    entries = iter(objects)
    while part := list(islice(entries, _AT_ONCE)):
        yield gc.get_referents(*part)


def _held_by(dead: Iterable[torch.Tensor]) -> Iterator[int]:
    """Storages of dead tensors that nobody else shares: one owner each, and the storage's own Python object."""
    strided = [tensor for tensor in dead if tensor.layout is torch.strided]
    owners = Counter(tensor.untyped_storage()._cdata for tensor in strided)
    for address, count in owners.items():
        if storage_use_count(address) <= count + 1:
            yield address
