"""What is known of the ops of a block, and the specs by which they are chosen.

A spec names ops: ``addmm``, its third call ``addmm#2``, ``_scaled_dot_product_*``, or a preset such as ``matmuls``.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from vramfit.errors import UsageError

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


# -- specs ---------------------------------------------------------------------------------------------------------

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "linear")
_CONVOLUTIONS = ("convolution", "cudnn_convolution*", "mkldnn_convolution")
_ATTENTION = ("_scaled_dot_product_*", "_flash_attention_forward", "_efficient_attention_forward")


PRESETS = {
    "matmuls": _PRODUCTS,
    "convolutions": _CONVOLUTIONS,
    "attention": _ATTENTION,
    "expensive": (*_PRODUCTS, *_CONVOLUTIONS, *_ATTENTION),
}
"""Names for groups of ops."""


def check_specs(specs: Iterable[str]) -> None:
    """Make sure that specs of ops mean something.

    Raises:
        UsageError: one is written otherwise, or no op has such a name.
    """
    for spec in specs:
        name, sign, ordinal = spec.partition("#")
        if not name or (sign and not ordinal.isdecimal()) or (sign and name in PRESETS):
            raise UsageError(
                f"{spec!r} names no op to keep",
                f"Write an aten op (addmm), its n-th call from 0 on (addmm#2), a pattern, or {', '.join(PRESETS)}",
            )
        if name in PRESETS or any(fnmatchcase(known, name) for known in _all_ops()):
            continue
        near = difflib.get_close_matches(name, (*PRESETS, *_all_ops()), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Give the name of an aten op"
        raise UsageError(f"torch has no op {name!r} to keep", hint)


@functools.cache
def _all_ops() -> frozenset[str]:
    """The names of all ops that are known now, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.rpartition("::")[2].partition(".")[0] for name in names)


def op_specs(names: Iterable[str]) -> tuple[str, ...]:
    """The ops of a block, in the order in which they run, each as the spec that means it alone: ``addmm#0``."""
    seen: Counter[str] = Counter()
    specs = []
    for name in names:
        specs.append(f"{name}#{seen[name]}")
        seen[name] += 1
    return tuple(specs)


def keeps(specs: Iterable[str], names: Iterable[str]) -> list[bool]:
    """Of each op of a block, in the order in which they run, whether these specs keep it."""
    matcher = Matcher(specs)
    return [matcher.wants(name) for name in names]


class Matcher:
    """Counts ops as they come, and says which are meant."""

    def __init__(self, specs: Iterable[str]) -> None:
        self.patterns: list[tuple[str, int | None]] = []
        for spec in specs:
            for pattern in PRESETS.get(spec, (spec,)):
                name, _, ordinal = pattern.partition("#")
                self.patterns.append((name, int(ordinal) if ordinal else None))
        self._matching: dict[str, list[int]] = {}
        self._seen = [0] * len(self.patterns)

    def wants(self, name: str) -> bool:
        """Whether the next op, of that name, is meant."""
        matching = self._matching.get(name)
        if matching is None:
            matching = [i for i, (pattern, _) in enumerate(self.patterns) if fnmatchcase(name, pattern)]
            self._matching[name] = matching
        found = False
        for index in matching:
            ordinal = self.patterns[index][1]
            found |= ordinal is None or ordinal == self._seen[index]
            self._seen[index] += 1
        return found
