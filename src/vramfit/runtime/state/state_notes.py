"""Notes of what was reached, from which it is put back after an attempt that failed.

NOTE [Contents by reference, values by copy]: of containers the contents are noted as they stand, a copy of references,
which costs a fraction of a microsecond each. Of tensors the values are copied where a step writes them; of all others
only autograd's count of writes is noted, which tells afterwards that one was written that nobody copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.runtime.oom_forms import recognised
from vramfit.runtime.state.check_sums import CheckSums
from vramfit.runtime.state.reach import (
    Reached,
    slots_of,
    stream_position,
    streams_are_equal,
    values_of_class,
)
from vramfit.techniques.core.array_values import copy_of_array, write_array
from vramfit.techniques.core.random_generators import GeneratorStates

_MISSING: Any = object()

ON_DEVICE = 1 << 20
"""Bytes of copies that stay on the device, where they take no time; more would be seen at the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrestored:
    """What a failed attempt changed and what nobody has a copy of.

    Attributes:
        what: in words.
    """

    what: str


class ContainersNote:
    """The contents of containers: mappings, sequences, names, cells, slots and classes.

    Args:
        reached: whose containers are noted.
    """

    def __init__(self, reached: Reached) -> None:
        self._mappings = [(one, dict(one)) for one in reached.mappings]
        self._sequences = [(one, list(one)) for one in reached.sequences]
        self._names = [
            (one, {name: one[name] for name in names if name in one}, names) for one, names in reached.names
        ]
        self._cells = [(one, _content(one)) for one in reached.cells]
        self._slots = [(one, slots_of(one)) for one in reached.slots]
        self._classes = [(one, values_of_class(one)) for one in reached.classes]
        self._training = [(one, one.training) for one in reached.modules]

    def restore(self) -> None:
        """The contents as they were; values inside of tensors are not touched."""
        for mapping, items in self._mappings:
            if not _same_items(mapping, items):
                attached = {key: value for key, value in mapping.items() if _is_attached(key)}
                mapping.clear()
                mapping.update({key: value for key, value in items.items() if not _is_attached(key)})
                mapping.update(attached)
        for sequence, elements in self._sequences:
            if not _same_elements(sequence, elements):
                _set_elements(sequence, elements)
        for space, items, names in self._names:
            for name in names:
                _set_name(space, name, items.get(name, _MISSING))
        for cell, content in self._cells:
            if _content(cell) is not content:
                _set_content(cell, content)
        for owner, values in self._slots:
            for name, value in values.items():
                if getattr(owner, name, _MISSING) is not value:
                    object.__setattr__(owner, name, value)
        for kind, values in self._classes:
            for name, value in values.items():
                if vars(kind).get(name, _MISSING) is not value:
                    setattr(kind, name, value)
        for module, training in self._training:
            if module.training is not training:
                module.training = training

    def differs(self) -> bool:
        """Whether a mapping, a sequence, a cell or a slot has another content now."""
        return (
            any(not _same_items(mapping, items) for mapping, items in self._mappings)
            or any(not _same_elements(sequence, elements) for sequence, elements in self._sequences)
            or any(_content(cell) is not content for cell, content in self._cells)
            or any(slots_of(owner) != values for owner, values in self._slots)
        )

    def has_changed(self, mappings: Iterable[dict[str, Any]]) -> bool:
        """Whether one of some mappings, or a sequence in one, has other contents now."""
        ids = set(map(id, mappings))
        inside: set[int] = set()
        for mapping, items in self._mappings:
            if id(mapping) in ids:
                if not _same_items(mapping, items):
                    return True
                inside.update(id(value) for value in items.values() if isinstance(value, list | set))
        return any(
            not _same_elements(sequence, elements)
            for sequence, elements in self._sequences
            if id(sequence) in inside
        )


class TensorsNote:
    """Tensors: values of some, and how often others were written.

    Args:
        copied: whose values are copied: the first of them on their device, the others on the host.
        watched: of which the count of writes is noted.
        on_host: copy to the host at once.
    """

    def __init__(
        self, copied_: Iterable[torch.Tensor], watched: Sequence[torch.Tensor] = (), *, on_host: bool = False
    ) -> None:
        self._copies = []
        left = 0 if on_host else ON_DEVICE
        for tensor in copied_:
            plain = solid(tensor)
            left -= plain.nbytes
            values = copied(plain) if left >= 0 or plain.device.type == "cpu" else on_the_host(plain)
            self._copies.append((tensor, values, version_of(tensor)))
        self._watched = watched
        self._versions = list(map(version_of, watched))
        self._gradients = [
            (tensor, tensor.grad) for tensor in watched if tensor.is_leaf and tensor.requires_grad
        ]

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(values.nbytes for _, values, _ in self._copies)

    @torch.no_grad()
    def restore(self) -> list[Unrestored]:
        """The values of those that were copied; which of the others were written."""
        for tensor, values, version in self._copies:
            if version < 0 or version_of(tensor) != version or not _equal(tensor, values):
                solid(tensor).copy_(values)
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        now = map(version_of, self._watched)
        pairs = zip(self._watched, self._versions, now, strict=True)
        return [
            Unrestored(what=f"a tensor of shape {tuple(one.shape)}")
            for one, before, after in pairs
            if before != after
        ]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether there is a copy of a tensor."""
        return any(one is tensor for one, _, _ in self._copies)

    def differs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was copied has other values now."""
        return any(one is tensor and not _equal(one, values) for one, values, _ in self._copies)

    def differing(self) -> list[torch.Tensor]:
        """The tensors that were copied and have other values now."""
        return [one for one, values, _ in self._copies if not _equal(one, values)]

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written since."""
        for one, values, version in self._copies:
            if one is tensor:
                return version_of(one) != version or not _equal(one, values)
        pairs = zip(self._watched, self._versions, strict=True)
        return any(one is tensor and version_of(one) != version for one, version in pairs)

    def written(self) -> list[torch.Tensor]:
        """Tensors that were watched or copied, and written."""
        now = map(version_of, self._watched)
        pairs = zip(self._watched, self._versions, now, strict=True)
        found = [tensor for tensor, before, after in pairs if before != after]
        return found + [
            tensor
            for tensor, values, version in self._copies
            if version_of(tensor) != version or (version < 0 and not _equal(tensor, values))
        ]


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
    """

    def __init__(
        self,
        reached: Reached,
        values: Iterable[torch.Tensor],
        watched: Sequence[torch.Tensor],
        device: torch.device,
        *,
        arrays: Sequence[Any] = (),
        on_host: bool = False,
    ) -> None:
        self.generators = GeneratorStates.of(device, reached.generators)
        self.containers = ContainersNote(reached)
        self.tensors = TensorsNote(values, watched, on_host=on_host)
        self.arrays = [(array, copy_of_array(array)) for array in arrays]
        self._streams = [(stream, stream_position(stream)) for stream in reached.streams]

    def restore(self) -> list[Unrestored]:
        """Put everything back; what cannot be is returned."""
        self.containers.restore()
        left = self.tensors.restore()
        for array, values in self.arrays:
            write_array(array, values)
        self.generators.restore()
        return left + [Unrestored(what=f"a {type(stream).__name__}") for stream in self.moved_streams()]

    def moved_streams(self) -> list[Any]:
        """Iterators that have moved on."""
        return [
            stream
            for stream, position in self._streams
            if not streams_are_equal(position, stream_position(stream))
        ]


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes to a tensor; -1 where none is kept, as in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the tensor's device, or on the host where there is no room.

    Raises:
        BaseException: the host has none either, or it is no shortage.
    """
    with torch.no_grad():
        try:
            return tensor.detach().clone()
        except BaseException as error:
            if tensor.device.type == "cpu" or recognised(error) is None:
                raise
        return tensor.detach().cpu()


def on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values on the host."""
    return tensor.detach().to("cpu", copy=True)


def solid(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without dimensions along which all its values are one in memory, as ``expand`` makes them."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    return torch.equal(solid(tensor.detach()).to(values.device), values)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set
        return _MISSING


def _set_content(cell: Any, content: Any) -> None:
    if content is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _set_name(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        space.pop(name, None)
    elif space.get(name, _MISSING) is not value:
        space[name] = value


def _is_attached(key: Any) -> bool:
    """Whether an attribute says what is put around a module's forward pass, and not what the module holds."""
    return isinstance(key, str) and (key == "forward" or key.startswith("_vramfit"))


def _same_items(mapping: dict[Any, Any], items: dict[Any, Any]) -> bool:
    if _equal_items(mapping, items):
        return True
    own = ({key: one for key, one in each.items() if not _is_attached(key)} for each in (mapping, items))
    return _equal_items(*own)


def _equal_items(mapping: dict[Any, Any], items: dict[Any, Any]) -> bool:
    if len(mapping) != len(items):
        return False
    return all(
        one is other and value is before
        for (one, value), (other, before) in zip(mapping.items(), items.items(), strict=True)
    )


def _same_elements(sequence: Any, elements: list[Any]) -> bool:
    return len(sequence) == len(elements) and all(
        one is other for one, other in itertools.zip_longest(sequence, elements)
    )


def _set_elements(sequence: Any, elements: list[Any]) -> None:
    if isinstance(sequence, list):
        sequence[:] = elements
        return
    sequence.clear()
    if isinstance(sequence, set):
        sequence.update(elements)
    else:
        sequence.extend(elements)
