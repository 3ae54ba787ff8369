"""Names for the ops of a block: ``addmm``, its third call ``addmm#2``, ``_scaled_dot_product_*``, ``matmuls``."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from vramfit.errors import UsageError

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
