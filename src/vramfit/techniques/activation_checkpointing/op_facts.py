"""What is known of an op from its schema, and the tensors among its arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

CAST = torch.ops.aten._to_copy.default
"""What autocast calls to make a copy in lower precision."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known of an op.

    Attributes:
        name: without its overload: ``addmm``.
        changes: its arguments that it changes in place, each with its place and its name.
        is_view: whether it gives a view of its argument.
        draws: whether it may draw random numbers.
    """

    name: str
    changes: tuple[tuple[int, str], ...]
    is_view: bool
    draws: bool


_NAMESPACES = ("aten", "prims")


def repeats(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second call gives the same: torch's own ops do nothing but compute, unlike collectives and others.

    What draws random numbers repeats where it is known from which generator before it runs: the default one of the CPU,
    or of the device of its arguments.
    """
    if getattr(op, "namespace", None) not in _NAMESPACES:
        return False
    if not op_facts(op).draws:
        return True
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return False
    device = torch.device(kwargs.get("device") or "cpu")
    return device.type == "cpu" or any(True for _ in tensors_in((args, kwargs)))


@functools.cache
def op_facts(op: Any) -> OpFacts:
    """What is known of an op."""
    schema = getattr(op, "_schema", None)  # higher-order ops have none
    arguments = schema.arguments if schema is not None else ()
    text: str = schema.name if schema is not None else str(op)
    return OpFacts(
        name=text.rpartition("::")[2],
        changes=tuple(
            (index, argument.name)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        is_view=bool(getattr(op, "is_view", False)),
        draws=torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()),
    )


def changed_arguments(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op changes in place."""
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in facts.changes]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, and with its count of changes in place (_detach_helper in checkpoint.py)."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results: called for each op, so without a general walk."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast caches this tensor's copy: a leaf that needs gradients (aten/src/ATen/autocast_mode.cpp)."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
