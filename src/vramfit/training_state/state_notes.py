"""Notes of what was reached, from which it is put back after an attempt that failed.

NOTE [Contents by reference, values by copy]: of containers the contents are noted as they stand (`container_kinds`). Of
tensors the values are copied where a step writes them, to where the user says; of all others only autograd's count of
writes is noted, which tells afterwards that one was written that nobody copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.training_state.array_values import ArrayState
from vramfit.training_state.check_sums import CheckSums
from vramfit.training_state.container_kinds import CELL, MAPPING, MODULE, SEQUENCE, SET, SLOTS, ContainerKind
from vramfit.training_state.random_generators import GeneratorStates
from vramfit.training_state.reach import Reached
from vramfit.training_state.stream_positions import stream_position, streams_are_equal
from vramfit.training_state.tensor_values import Copying, solid, version_of, where_it_is

_COMPARED = (MAPPING, MODULE, SEQUENCE, SET, CELL, SLOTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrestored:
    """What a failed attempt changed and what nobody has a copy of.

    Attributes:
        what: in words.
    """

    what: str


class ContainersNote:
    """The contents of containers.

    Args:
        reached: whose containers are noted.
    """

    def __init__(self, reached: Reached) -> None:
        self._notes = [(kind, owners, kind.all_contents(owners)) for kind, owners in reached.noted()]

    def restore(
        self, left: Callable[[ContainerKind, Any, Any], Collection[Any] | None] = lambda *_: ()
    ) -> None:
        """The contents as they were; values inside of tensors are not touched.

        Args:
            left: of a kind, a container and its former contents, the keys whose values stay; None for all of them.
        """
        for kind, owners, contents in self._notes:
            for owner, kept in zip(owners, contents, strict=True):
                if kind.differs(owner, kept) and (stay := left(kind, owner, kept)) is not None:
                    kind.put(owner, kept, stay)

    def differs(self) -> bool:
        """Whether a container has another content now; globals, classes and modes are not asked."""
        return any(
            kind.differs(owner, kept)
            for kind, owners, contents in self._notes
            if kind in _COMPARED
            for owner, kept in zip(owners, contents, strict=True)
        )

    def has_changed(self, mappings: Iterable[dict[str, Any]]) -> bool:
        """Whether one of some mappings, or a sequence in one, has other contents now."""
        ids = set(map(id, mappings))
        inside: set[int] = set()
        for kind, owners, contents in self._notes:
            for owner, kept in zip(owners, contents, strict=True):
                if id(owner) in ids:
                    if kind.differs(owner, kept):
                        return True
                    inside.update(id(value) for value in kept.values() if isinstance(value, list | set))
        return any(
            id(owner) in inside and kind.differs(owner, kept)
            for kind, owners, contents in self._notes
            if kind in (SEQUENCE, SET)
            for owner, kept in zip(owners, contents, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class TensorCopy:
    """The values of a tensor, or of some of its rows."""

    tensor: torch.Tensor
    values: torch.Tensor
    version: int
    rows: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, copying: Copying = where_it_is) -> TensorCopy:
        """The values now."""
        return cls(tensor, copying(solid(tensor)), version_of(tensor))

    @classmethod
    def of_rows(cls, tensor: torch.Tensor, rows: torch.Tensor) -> TensorCopy:
        """Those of some rows."""
        return cls(tensor, tensor.detach().index_select(0, rows), version_of(tensor), rows)

    @property
    def counted(self) -> bool:
        """Whether autograd has counted writes since."""
        return version_of(self.tensor) != self.version

    def differs(self) -> bool:
        """Whether the tensor has other values now; NaN is other than NaN, so that nothing is allocated to tell."""
        now = solid(self.tensor.detach()).to(self.values.device)
        same = now.shape == self.values.shape and now.dtype == self.values.dtype
        return not (same and torch.equal(now, self.values))

    def restore(self, *, compare: bool = True) -> None:
        """Write the values again; where gradients are not recorded.

        Args:
            compare: not where they are the same though no write was counted; to compare takes memory and time.
        """
        tensor, values = self.tensor, self.values
        if self.rows is not None:
            tensor.index_copy_(0, self.rows, values.to(tensor.device))
            return
        if compare and not self.counted and not self.differs():
            return
        place = solid(tensor)
        if place.shape != values.shape or place.dtype != values.dtype:
            tensor.data = values.to(tensor.device, copy=True)
        else:
            place.copy_(values)


class TensorsNote:
    """Tensors: values of some, and how often others were written.

    Args:
        copied: whose values are copied.
        watched: of which the count of writes is noted.
        copying: makes the copies.
    """

    def __init__(
        self,
        copied: Iterable[torch.Tensor],
        watched: Sequence[torch.Tensor] = (),
        *,
        copying: Copying = where_it_is,
    ) -> None:
        with torch.no_grad():
            each = {id(tensor): tensor for tensor in copied}
            self._copies = {key: TensorCopy.of(tensor, copying) for key, tensor in each.items()}
        self._watched = watched
        self._versions = list(map(version_of, watched))
        self._gradients = GradientsNote(one for one in watched if one.requires_grad)
        # A loss may freeze layers for a while.
        leaves = (one for one in (*each.values(), *watched) if one.is_leaf)
        self._recorded = [(one, one.requires_grad) for one in leaves]

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(one.values.nbytes for one in self._copies.values())

    @torch.no_grad()
    def restore(self) -> list[Unrestored]:
        """The values of those that were copied, and what requires gradients; which of the others were written."""
        for one in self._copies.values():
            one.restore()
        for tensor, recorded in self._recorded:
            if tensor.requires_grad is not recorded and tensor.is_leaf:
                tensor.requires_grad_(recorded)
        self._gradients.restore()
        return [Unrestored(what=f"a tensor of shape {tuple(one.shape)}") for one in self._counted()]

    def copy_of(self, tensor: torch.Tensor) -> TensorCopy | None:
        """The copy of a tensor, None if it was not copied."""
        return self._copies.get(id(tensor))

    def differing(self) -> list[torch.Tensor]:
        """The tensors that were copied and have other values now."""
        return [one.tensor for one in self._copies.values() if one.differs()]

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written since."""
        copy = self.copy_of(tensor)
        if copy is not None:
            return copy.counted or copy.differs()
        return any(one is tensor for one in self._counted())

    def written(self) -> list[torch.Tensor]:
        """Tensors that were watched or copied, and written."""
        return self._counted() + [
            one.tensor for one in self._copies.values() if one.counted or (one.version < 0 and one.differs())
        ]

    def _counted(self) -> list[torch.Tensor]:
        now = map(version_of, self._watched)
        pairs = zip(self._watched, self._versions, now, strict=True)
        return [tensor for tensor, before, after in pairs if before != after]


class GradientsNote:
    """Which gradients some tensors have; their values are not copied.

    Args:
        tensors: those that are no leaves are left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._gradients = [(one, one.grad) for one in tensors if one.is_leaf]

    def restore(self) -> None:
        """The same gradients, whatever they hold."""
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient


class FarNote:
    """What very long containers hold, as it was when it was last looked at: it is not copied, but compared.

    Args:
        far: what they hold.
        without: tensors that are copied, by ``id``.
    """

    def __init__(self, far: Reached, *, without: Container[int] = ()) -> None:
        self._containers = ContainersNote(far)
        self._values = CheckSums(one for one in (*far.tensors, *far.arrays) if id(one) not in without)

    def tensors_written(self) -> list[torch.Tensor]:
        """Tensors that were written since."""
        return [one for one in self._values.written(counted=True) if isinstance(one, torch.Tensor)]

    def containers_differ(self) -> bool:
        """Whether a container has another content since."""
        return self._containers.differs()

    def differs(self) -> bool:
        """Whether anything was written since."""
        return self._containers.differs() or bool(self._values.written(counted=True))


class StateNote:
    """All that an attempt may change, as it is now. See NOTE [Contents by reference, values by copy].

    Args:
        reached: what the step reaches.
        values: tensors whose values are copied.
        watched: tensors whose writes are noticed.
        device: whose generator the step draws from.
        arrays: whose values are copied.
        copying: makes copies of tensors.
    """

    def __init__(
        self,
        reached: Reached,
        values: Iterable[torch.Tensor],
        watched: Sequence[torch.Tensor],
        device: torch.device,
        *,
        arrays: Sequence[Any] = (),
        copying: Copying = where_it_is,
    ) -> None:
        self.generators = GeneratorStates.of(device, reached.generators)
        self.containers = ContainersNote(reached)
        self.tensors = TensorsNote(values, watched, copying=copying)
        self.arrays = [(array, ArrayState.of(array)) for array in arrays]
        self._streams = [(stream, stream_position(stream)) for stream in reached.streams]

    def restore(self) -> list[Unrestored]:
        """Put everything back; what cannot be is returned."""
        self.containers.restore()
        left = self.tensors.restore()
        for array, values in self.arrays:
            values.restore(array)
        self.generators.restore()
        return left + [Unrestored(what=f"a {type(stream).__name__}") for stream in self.moved_streams()]

    def arrays_written(self) -> list[Any]:
        """Arrays that were copied and have other values now."""
        return [array for array, values in self.arrays if not values.is_in(array)]

    def moved_streams(self) -> list[Any]:
        """Iterators that have moved on."""
        return [
            stream
            for stream, position in self._streams
            if not streams_are_equal(position, stream_position(stream))
        ]
