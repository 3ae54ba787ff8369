"""What can be expected of values that nobody computed: which share of a mask holds, how many values an index takes.

`torch.topk` over 8 experts gives indices below 8, so one of 8 equals a given expert; `one_hot` holds one element in
as many as there are classes. Where nothing is known, half of a mask is expected to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

_aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

WATCHED = frozenset((*_INTEGERS, torch.bool))
"""Types of masks and indices: nothing is expected of others, so that writing to them need not be watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What is expected of a tensor's values.

    Attributes:
        share: of the elements that are not zero; None where nothing is known.
        exact: that share holds for the whole tensor, not for a part of it.
        unit: what is not zero is 1.
        values: how many different values the elements take, counted from 0; None where nothing is known.
        negated: the elements are those that do not hold in another mask, so the two counts sum to all.
    """

    share: float | None = None
    exact: bool = False
    unit: bool = False
    values: int | None = None
    negated: bool = False

    def count(self, elements: int) -> int:
        """How many of so many elements are expected not to be zero."""
        share = 0.5 if self.share is None else self.share
        return elements - round(elements * (1 - share)) if self.negated else round(elements * share)


NOTHING = Expectation()
Lookup = Callable[[torch.Tensor], Expectation]


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments and its result, and what is expected of its arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    look: Lookup

    @property
    def source(self) -> torch.Tensor:
        """The first argument."""
        found: torch.Tensor = self.args[0]
        return found

    @property
    def known(self) -> Expectation:
        """What is expected of the first argument."""
        return self.look(self.args[0])


Rule = Callable[[Call], Expectation | None]


def expectation(
    func: torch._ops.OpOverload, look: Lookup, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> tuple[torch.Tensor, Expectation] | None:
    """The result of an op of which something is expected, and what; None for most ops.

    Args:
        func: the op.
        look: gives what is expected of an argument.
        args, kwargs: the op's arguments.
        out: its result.
    """
    rule = _RULES.get(func)
    if rule is None:
        return None
    position, expect = rule
    target = out[position] if isinstance(out, (tuple, list)) else out
    if not isinstance(target, torch.Tensor) or target.dtype not in WATCHED:
        return None
    found = expect if isinstance(expect, Expectation) else expect(Call(args, kwargs, out, look))
    return None if found is None or found == NOTHING else (target, found)


def _axis_values(call: Call) -> Expectation:
    """Indices along a dimension: as many values as it is long."""
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if axis is None:
        return Expectation(values=call.source.numel())
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _topk(call: Call) -> Expectation:
    axis = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else -1)
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _last_axis(call: Call) -> Expectation:
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 and type(call.args[1]) is int else -1)
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _stable_sort(call: Call) -> Expectation:
    return Expectation(values=call.source.shape[call.kwargs.get("dim", -1)] if call.source.dim() else 1)


def _multinomial(call: Call) -> Expectation:
    return Expectation(values=call.source.shape[-1])


def _randint(call: Call) -> Expectation:
    return Expectation(values=max(1, int(call.args[0])))


def _randint_low(call: Call) -> Expectation:
    return Expectation(values=max(1, int(call.args[1])))


def _same(call: Call) -> Expectation:
    return replace(
        call.known,
        exact=call.known.exact and call.source.numel() == call.out.numel(),
    )


def _cast(call: Call) -> Expectation:
    found = _same(call)
    return replace(found, unit=True) if call.out.dtype is torch.bool else found


def _copied(call: Call) -> Expectation:
    return call.look(call.args[1]) if isinstance(call.args[1], torch.Tensor) else NOTHING


def _one_hot_scatter(call: Call) -> Expectation:
    """``zeros.scatter_(dim, index, 1)``: as many ones as there are indices."""
    target, _, index, value = call.args[:4]
    if call.look(target).share != 0.0 or not isinstance(value, (int, float)) or not target.numel():
        return NOTHING
    return Expectation(share=min(1.0, index.numel() / target.numel()), exact=True, unit=value == 1)


def _equal_number(call: Call) -> Expectation:
    """One of the values that an index takes; a fraction that was computed hits no given number."""
    if call.source.is_floating_point():
        return Expectation(share=0.0, unit=True)
    values = call.known.values
    return Expectation(share=1 / values if values else None, unit=True)


def _equal_tensor(call: Call) -> Expectation:
    """An index compared with all that it may be (``index[..., None] == arange``) is one-hot."""
    first, second = call.known.values, call.look(call.args[1]).values
    values = max(filter(None, (first, second)), default=None)
    if values is None:
        return Expectation(unit=True)
    one_hot = values in (call.source.shape[-1:] + call.args[1].shape[-1:]) and first is not None
    return Expectation(share=1 / values, exact=one_hot, unit=True)


def _negated(found: Expectation) -> Expectation:
    share = None if found.share is None else 1 - found.share
    return Expectation(share=share, exact=found.exact, unit=True, negated=not found.negated)


def _unequal(call: Call) -> Expectation:
    if not isinstance(call.args[1], torch.Tensor) and call.args[1] == 0 and call.known.share is not None:
        return replace(call.known, unit=True, values=None)
    return _negated(_equal_number(call))


def _not(call: Call) -> Expectation | None:
    if call.out.dtype is not torch.bool:
        return None
    return _negated(call.known)


def _subtracted(call: Call) -> Expectation:
    """``1 - mask``."""
    return _negated(call.known) if call.known.unit and call.args[1] == 1 else NOTHING


def _above(call: Call) -> Expectation:
    """``counts > 0``: what is not zero, where nothing is negative."""
    known = call.known
    if isinstance(call.args[1], torch.Tensor) or call.args[1] != 0 or known.share is None:
        return Expectation(unit=True)
    return replace(known, unit=True, values=None)


def _summed(call: Call) -> Expectation:
    """Counts of what holds along a dimension: 0 only where nothing does."""
    if not (call.known.unit or call.source.dtype is torch.bool) or not call.out.numel():
        return NOTHING
    share = 0.5 if call.known.share is None else call.known.share
    return Expectation(share=1 - (1 - share) ** (call.source.numel() // call.out.numel()))


def _binned(call: Call) -> Expectation:
    """Counts of each value: 0 only where none fell."""
    bins = call.out.numel()
    return Expectation(share=1 - (1 - 1 / bins) ** call.source.numel()) if bins else NOTHING


def _both(call: Call) -> Expectation | None:
    shares = [call.look(a).share for a in call.args[:2] if isinstance(a, torch.Tensor)]
    if call.out.dtype is not torch.bool or len(shares) < 2:
        return None
    return Expectation(share=prod(0.5 if s is None else s for s in shares), unit=True)


def _either(call: Call) -> Expectation | None:
    shares = [call.look(a).share for a in call.args[:2] if isinstance(a, torch.Tensor)]
    if call.out.dtype is not torch.bool or len(shares) < 2:
        return None
    return Expectation(share=1 - prod(1 - (0.5 if s is None else s) for s in shares), unit=True)


def _constant(value: Any) -> Expectation:
    if not isinstance(value, (bool, int, float)):
        return NOTHING
    return Expectation(share=float(value != 0), exact=True, unit=value in (0, 1))


def _full(call: Call) -> Expectation:
    return _constant(call.args[1] if len(call.args) > 1 else call.kwargs.get("fill_value"))


def _filled(call: Call) -> Expectation:
    return _constant(call.args[1]) if is_whole(call.source) else NOTHING


def _arange(call: Call) -> Expectation | None:
    return Expectation(values=max(1, call.out.numel())) if call.out.dtype in _INTEGERS else None


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all elements of its storage, rather than viewing a part of them."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


_TABLE: dict[tuple[str, ...], tuple[int, Rule | Expectation]] = {
    ("argmax", "argmin"): (0, _axis_values),
    ("argsort", "argsort.stable"): (0, _last_axis),
    ("topk",): (1, _topk),
    ("sort",): (1, _last_axis),
    ("sort.stable",): (1, _stable_sort),
    ("max.dim", "min.dim"): (1, _axis_values),
    ("multinomial",): (0, _multinomial),
    ("randint", "randint.generator"): (0, _randint),
    ("randint.low", "randint.low_generator"): (0, _randint_low),
    ("arange", "arange.start", "arange.start_step"): (0, _arange),
    ("clone", "index.Tensor", "index_select", "expand_copy"): (0, _same),
    ("_to_copy",): (0, _cast),
    ("copy_",): (0, _copied),
    ("scatter_.value", "scatter.value"): (0, _one_hot_scatter),
    ("eq.Scalar",): (0, _equal_number),
    ("eq.Tensor",): (0, _equal_tensor),
    ("ne.Scalar",): (0, _unequal),
    ("ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor"): (0, Expectation(unit=True)),
    ("ge.Scalar", "ge.Tensor"): (0, Expectation(unit=True)),
    ("gt.Scalar",): (0, _above),
    ("gt.Tensor",): (0, Expectation(unit=True)),
    ("sum", "sum.dim_IntList", "any.dim", "any.dims", "count_nonzero.dim_IntList"): (0, _summed),
    ("bincount", "histc"): (0, _binned),
    ("logical_not", "bitwise_not"): (0, _not),
    ("rsub.Scalar",): (0, _subtracted),
    ("logical_and", "bitwise_and.Tensor", "mul.Tensor"): (0, _both),
    ("logical_or", "bitwise_or.Tensor"): (0, _either),
    ("ones", "ones_like", "new_ones"): (0, Expectation(share=1.0, exact=True, unit=True)),
    ("zeros", "zeros_like", "new_zeros", "zero_"): (0, Expectation(share=0.0, exact=True, unit=True)),
    ("full", "full_like"): (0, _full),
    ("fill_.Scalar",): (0, _filled),
}
_RULES: dict[torch._ops.OpOverload, tuple[int, Rule | Expectation]] = {}
for _names, _entry in _TABLE.items():
    for _name in _names:
        _packet, _, _overload = _name.partition(".")
        _op = getattr(getattr(_aten, _packet, None), _overload or "default", None)
        if isinstance(_op, torch._ops.OpOverload):
            _RULES[_op] = _entry
