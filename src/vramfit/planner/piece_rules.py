"""What becomes of the state that pieces of a batch write: found by comparing it with what the whole batch writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from vramfit.training_state.forward_state import Written, attribute_of, same_values

_OF_CHANGE, _OF_VALUE = 1e-4, 1e-6
"""Parts of a value's change, and of the value, by which 32 bits may round it."""


_BLANK = " "
"""In names of what lies outside the model, which a plan cannot put together: ``the global count``."""


class _Rule(Enum):
    ONCE = "once"
    SUMMED = "summed"
    AVERAGED = "averaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateNames:
    """Names of attributes that pieces of a batch write, as `MicroBatchingSetting` has them."""

    once: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


@dataclass(slots=True)
class PieceRules:
    """Gathers, batch after batch, how what pieces write relates to what the whole writes."""

    _possible: dict[str, set[_Rule]] = field(default_factory=dict)

    def take(
        self, whole: Mapping[str, Written], pieces: Sequence[Mapping[str, Written]], shares: Sequence[float]
    ) -> None:
        """Compare one batch with its pieces, each of which began with the state that the batch began with.

        Args:
            shares: of the batch's examples that each piece holds.
        """
        names = dict.fromkeys(name for part in (whole, *pieces) for name in part)
        for name in names:
            before = next(part[name].before for part in (whole, *pieces) if name in part)
            after = whole[name].after if name in whole else before
            parts = [part[name].after if name in part else before for part in pieces]
            possible = set(_rules(before, after, parts, shares, alone=attribute_of(name) == name))
            self._possible[name] = self._possible.get(name, set(_Rule)) & possible

    def names(
        self, scratch: Callable[[frozenset[str]], bool], buffers: frozenset[str], *, outside: bool = False
    ) -> StateNames | str:
        """What becomes of each attribute; or the name of one of which nothing can become.

        Args:
            scratch: whether attributes are only written, and never read before they are written again.
            buffers: names of the model's buffers, which go to checkpoints and are read by others: none is scratch.
            outside: whether what lies outside the model is written as the whole writes it, too.
        """
        by_attribute: dict[str, set[_Rule]] = {}
        for name, possible in self._possible.items():
            attribute = attribute_of(name)
            by_attribute[attribute] = by_attribute.get(attribute, set(_Rule)) & possible
        lost = frozenset(
            name
            for name, possible in by_attribute.items()
            if not possible or (_BLANK in name and not (outside and _Rule.ONCE in possible))
        )
        if lost and (lost & buffers or not scratch(lost)):
            return min(lost & buffers or lost)
        rules = {
            name: next(rule for rule in _Rule if rule in possible)
            for name, possible in by_attribute.items()
            if name not in lost
        }
        return StateNames(
            **{rule.value: tuple(name for name in sorted(rules) if rules[name] is rule) for rule in _Rule}
        )


def _rules(
    before: Any, after: Any, parts: Sequence[Any], shares: Sequence[float], *, alone: bool
) -> list[_Rule]:
    """Which rules give what the whole wrote from what its pieces did."""
    found = []
    if all(same_values(part, after) or _close(part, after, before) for part in parts):
        found.append(_Rule.ONCE)
    if not alone or not all(_is_number(value) and _alike(value, after) for value in (before, after, *parts)):
        return found
    sums = before
    mean = None
    for part, share in zip(parts, shares, strict=True):
        sums = sums + (part - before)
        mean = part * share if mean is None else mean + part * share
    if _close(sums, after, before):
        found.append(_Rule.SUMMED)
    if _is_real(after) and _close(mean, after, before):
        found.append(_Rule.AVERAGED)
    return found


def _close(one: Any, other: Any, before: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if not (_is_number(one) and _is_number(other) and _alike(one, other)):
        return False
    if not _is_real(other):
        return same_values(one, other)
    size, off = _norm(other), _norm(one - other)
    change = _norm(other - before) if _is_number(before) and _alike(before, other) else size
    return off <= max(_OF_CHANGE * change, _OF_VALUE * size, torch.finfo(torch.float32).tiny)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)


def _norm(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach().double().norm())
    return math.fabs(value)
