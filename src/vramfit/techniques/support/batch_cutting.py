"""Cuts a batch of any containers along its batch dimension, which is found from the batch itself."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from vramfit.errors import UsageError
from vramfit.workload import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a batch is cut.

    Attributes:
        size: its examples.
        examples: whether lists inside it hold one entry for each example, as in object detection.
        uncut: names of what goes to every piece as it is.
    """

    size: int
    examples: bool = False
    uncut: tuple[str, ...] = ()

    def piece(self, batch: Batch, start: int, stop: int) -> Batch:
        """The examples from `start` to before `stop`: views of the tensors, in the containers of the batch."""
        if isinstance(batch, torch.Tensor):
            return batch[start:stop] if batch.dim() and batch.shape[0] == self.size else batch
        if isinstance(batch, list | tuple) and len(batch) == self.size and self._one_of_each(batch):
            return batch[start:stop]

        def part(name: str, value: Any) -> Any:
            return value if name in self.uncut else self.piece(value, start, stop)

        return mapped(batch, part)

    def _one_of_each(self, batch: list[Any] | tuple[Any, ...]) -> bool:
        return (self.examples and type(batch) is list) or all(_is_plain(item) for item in batch)


def find_cut(batch: Batch, uncut: tuple[str, ...] = ()) -> Cut:
    """How a batch can be cut: along the leading size that its tensors share.

    Scalars and tensors of another leading size go to every piece as they are; so do those named in `uncut`. Where
    leading sizes differ and the batch holds lists of one length, as many as examples, the lists are cut.

    Raises:
        UsageError: nothing in the batch has a batch dimension.
    """
    if isinstance(batch, PackedSequence):
        raise UsageError(
            "a packed sequence cannot be cut into micro-batches", "Let the model pack the padded sequences"
        )
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch, uncut) if tensor.dim())
    shared = [size for size in sizes if size != 1]
    lengths = {len(found) for found in _lists(batch, uncut)}
    if len(shared) > 1 and len(lengths) == 1 and 1 not in lengths:
        return Cut(size=lengths.pop(), examples=True, uncut=uncut)
    if shared:
        # Of equally frequent ones the first that was met.
        return Cut(size=max(shared, key=lambda size: sizes[size]), uncut=uncut)
    if sizes:
        return Cut(size=1, uncut=uncut)
    if len(lengths) == 1:
        return Cut(size=lengths.pop(), examples=True, uncut=uncut)
    raise UsageError(
        f"a batch of type {type(batch).__name__} has no tensor with a batch dimension",
        "Give micro-batching tensors, or tuples, lists, dicts or dataclasses of them",
    )


def mapped(batch: Batch, part: Callable[[str, Any], Any]) -> Batch:
    """A batch of the same containers with `part` of each entry, by its name or number; what has none is itself."""
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        for name in list(batch):
            made[name] = part(str(name), batch[name])
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(part(name, getattr(batch, name)) for name in batch._fields))
    if isinstance(batch, list | tuple):
        return type(batch)(part(str(number), value) for number, value in enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # A frozen dataclass allows no other way to the same class, and its own __init__ may do more than assign.
            object.__setattr__(made, field.name, part(field.name, getattr(batch, field.name)))
        return made
    return batch


def entry(batch: Batch, name: str) -> Any:
    """An entry of a batch by its name, or by its number written out; None where there is none."""
    found: list[Any] = []

    def look(known: str, value: Any) -> Any:
        if known == name:
            found.append(value)
        return value

    mapped(batch, look)
    return found[0] if found else None


def _entries(batch: Batch, uncut: tuple[str, ...]) -> Iterator[Any]:
    found: list[Any] = []

    def take(name: str, value: Any) -> Any:
        if name not in uncut:
            found.append(value)
        return value

    mapped(batch, take)
    yield from found


def _tensors(batch: Batch, uncut: tuple[str, ...]) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for value in _entries(batch, uncut):
            yield from _tensors(value, uncut)


def _lists(batch: Batch, uncut: tuple[str, ...], *, outermost: bool = True) -> Iterator[list[Any]]:
    """The lists that could hold one entry for each example: not that of a whole batch's parts, as loaders make it."""
    if isinstance(batch, torch.Tensor):
        return
    if isinstance(batch, list) and batch:
        parts = outermost and not all(isinstance(item, Mapping) or _is_plain(item) for item in batch)
        if not parts:
            yield batch
            return
    for value in _entries(batch, uncut):
        yield from _lists(value, uncut, outermost=False)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bytes | int | float)
