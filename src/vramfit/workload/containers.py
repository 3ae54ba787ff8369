"""Batches and outputs as trees: dicts, named tuples, lists and dataclasses, rebuilt with other parts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mapped(batch: Any, part: Callable[[str, Any], Any]) -> Any:
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


def mapped_leaves(value: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same containers with `leaf` of everything in them that is no container, by its path (``hidden_states.0``)."""
    entries: list[str] = []

    def inner(name: str, part: Any) -> Any:
        entries.append(name)
        return mapped_leaves(part, leaf, f"{path}.{name}" if path else name)

    made = mapped(value, inner)
    return leaf(path, value) if not entries and made is value else made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in mappings, lists, tuples and dataclasses, in order; nothing is copied."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def named_tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in some containers, in order, each with its path."""
    import torch

    found: list[tuple[str, torch.Tensor]] = []

    def leaf(path: str, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            found.append((path, part))
        return part

    mapped_leaves(value, leaf)
    return found
