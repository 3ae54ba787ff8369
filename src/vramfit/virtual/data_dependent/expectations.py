"""What can be expected of values that nobody computed: which share of a mask holds, how many values an index takes.

`torch.topk` over 8 experts gives indices below 8, so one of 8 equals a given expert; `one_hot` holds one element in
as many as there are classes. Where nothing is known, half of a mask is expected to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, isfinite, prod
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.op_call import OpCall

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
        values: how many different values the elements take, counted from `least`; None where nothing is known.
        least: the lowest of the values; counts of what holds have none of their own and are at least 0.
        total: what all elements sum to; None where nothing is known.
        constant: the one value of all elements; None where they differ or nothing is known.
        columns: where each of so many columns lies one after the other: how many values each takes (``nonzero``).
        most: no more elements are not zero; None where nothing is known.
        negated: the elements are those that do not hold in another mask, so the two counts sum to all.
    """

    share: float | None = None
    exact: bool = False
    unit: bool = False
    values: int | None = None
    least: int = 0
    constant: int | None = None
    total: int | None = None
    columns: tuple[int, ...] = ()
    negated: bool = False
    most: int | None = None

    @property
    def at_most(self) -> int | None:
        """How many elements are not zero at most; None where nothing is known."""
        return 0 if self.constant == 0 else self.most

    def count(self, elements: int) -> int:
        """How many of so many elements are expected not to be zero."""
        share = 0.5 if self.share is None else self.share
        return elements - round(elements * (1 - share)) if self.negated else round(elements * share)


NOTHING = Expectation()
Lookup = Callable[[torch.Tensor], Expectation]


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call, and what is expected of its arguments."""

    op: OpCall
    look: Lookup

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments."""
        return self.op.args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return self.op.kwargs

    @property
    def out(self) -> Any:
        """The results."""
        return self.op.out

    @property
    def source(self) -> torch.Tensor:
        """The first argument."""
        found: torch.Tensor = self.args[0]
        return found

    @property
    def known(self) -> Expectation:
        """What is expected of the first argument."""
        return self.look(self.args[0])


_FEW = 4096
"""Elements up to which a search for tokens is taken for one of tokens that end a text."""

Rule = Callable[[ExpectedCall], Expectation | None]


def may_be_expected(call: OpCall, written: Sequence[torch.Tensor]) -> bool:
    """Whether `expectation` may say something of an op's result, or what it writes ends what was expected."""
    if any(tensor.dtype in WATCHED for tensor in written):
        return True
    results = call.out if isinstance(call.out, (tuple, list)) else (call.out,)
    return call.func in _RULES and any(isinstance(t, torch.Tensor) and t.dtype in WATCHED for t in results)


def expectation(call: OpCall, look: Lookup) -> tuple[torch.Tensor, Expectation] | None:
    """The result of an op of which something is expected, and what; None for most ops.

    Args:
        call: the op, whose results are known.
        look: gives what is expected of an argument.
    """
    rule = _RULES.get(call.func)
    if rule is None:
        return None
    position, expect = rule
    target = call.out[position] if isinstance(call.out, (tuple, list)) else call.out
    if not isinstance(target, torch.Tensor) or target.dtype not in WATCHED:
        return None
    found = expect if isinstance(expect, Expectation) else expect(ExpectedCall(call, look))
    return None if found is None or found == NOTHING else (target, found)


def _axis_values(call: ExpectedCall) -> Expectation:
    """Indices along a dimension: as many values as it is long."""
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if axis is None:
        return Expectation(values=call.source.numel())
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _topk(call: ExpectedCall) -> Expectation:
    axis = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else -1)
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _last_axis(call: ExpectedCall) -> Expectation:
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 and type(call.args[1]) is int else -1)
    return Expectation(values=call.source.shape[axis] if call.source.dim() else 1)


def _multinomial(call: ExpectedCall) -> Expectation:
    return Expectation(values=call.source.shape[-1])


def _randint(call: ExpectedCall) -> Expectation:
    return Expectation(values=max(1, int(call.args[0])))


def _randint_low(call: ExpectedCall) -> Expectation:
    low, high = int(call.args[0]), int(call.args[1])
    return Expectation(values=max(1, high - low), least=low)


def _same(call: ExpectedCall) -> Expectation:
    """Some of the elements of the first argument, some of them perhaps more often than once."""
    return _taken(call.known, call.source, call.out)


def _taken(known: Expectation, source: torch.Tensor, out: torch.Tensor) -> Expectation:
    whole = known.constant is not None or source.numel() == out.numel()
    return known if whole else replace(known, exact=False, total=None, most=None)


def _picked(call: ExpectedCall) -> Expectation:
    """Elements that indices pick, which may pick one more often than once."""
    return replace(_same(call), most=None)


def _cast(call: ExpectedCall) -> Expectation:
    return _as_type(_same(call), call.source, call.out.dtype)


def _copied(call: ExpectedCall) -> Expectation:
    source = call.args[1]
    if not isinstance(source, torch.Tensor):
        return NOTHING
    return _as_type(_taken(call.look(source), source, call.out), source, call.out.dtype)


def _as_type(found: Expectation, source: torch.Tensor, dtype: torch.dtype) -> Expectation:
    if dtype is not torch.bool or source.dtype is torch.bool:
        return found
    return _holds(ne, found, 0)


def _one_hot_scatter(call: ExpectedCall) -> Expectation:
    """``zeros.scatter_(dim, index, 1)``: as many ones as there are indices."""
    target, _, index, value = call.args[:4]
    if call.look(target).share != 0.0 or value != 1 or not target.numel():
        return NOTHING
    return Expectation(share=min(1.0, index.numel() / target.numel()), exact=True, unit=True)


def _put(call: ExpectedCall) -> Expectation | None:
    """``mask[positions] = True``: no more elements are not zero than were, and those positions."""
    before, shape = call.known.at_most, call.source.shape
    given = {axis: index for axis, index in enumerate(call.args[1]) if index is not None}
    if before is None or not given or any(index.dtype is torch.bool for index in given.values()):
        return None
    places = torch.broadcast_shapes(*(index.shape for index in given.values())).numel()
    written = places * prod(size for axis, size in enumerate(shape) if axis not in given)
    return bounded(min(call.source.numel(), before + written), call.source)


def _fill_places(call: ExpectedCall) -> Expectation | None:
    """``mask.index_fill_(dim, positions, 1)``, which ``mask[positions] = 1`` is since torch 2.15."""
    before, shape = call.known.at_most, call.source.shape
    dim, index = call.args[1:3]
    if before is None or not shape:
        return None
    written = index.numel() * prod(size for axis, size in enumerate(shape) if axis != dim % len(shape))
    return bounded(min(call.source.numel(), before + written), call.source)


def bounded(most: int, mask: torch.Tensor, share: float | None = None) -> Expectation:
    """What is expected of a mask of which so many elements may hold at most, and as many do or the given share."""
    expected = min(1.0, most / max(1, mask.numel())) if share is None else share
    return Expectation(share=expected, unit=mask.dtype is torch.bool, most=most)


def rewritten(known: Expectation, view: torch.Tensor, found: Expectation | None) -> Expectation | None:
    """What is expected of a whole mask after a part of it was written; None where nothing is known.

    Args:
        known: what was expected before.
        view: the part.
        found: what is expected of what was written.
    """
    if known.at_most is None or is_whole(view):
        return None
    whole = view.untyped_storage().nbytes() // view.element_size()
    elements = min(view.numel(), whole)
    most = elements if found is None or found.at_most is None else min(elements, found.at_most)
    holding = min(most, elements // 2 if found is None else found.count(elements))
    before = known.at_most if known.share is None else round(known.share * whole)
    return Expectation(
        share=min(whole, before + holding) / whole,
        unit=view.dtype is torch.bool,
        most=min(whole, known.at_most + most),
    )


def _joined(call: ExpectedCall) -> Expectation | None:
    """Parts of which some are known to hold few elements."""
    parts = [(part.numel(), call.look(part)) for part in call.args[0]]
    if all(known.at_most is None for _, known in parts):
        return None
    most = sum(n if known.at_most is None else min(n, known.at_most) for n, known in parts)
    expected = sum(min(known.count(n), n if known.at_most is None else known.at_most) for n, known in parts)
    return bounded(most, call.out, expected / max(1, call.out.numel()))


def _compared(how: Callable[[float, float], bool]) -> Rule:
    """What holds in a comparison with a number."""

    def compare(call: ExpectedCall) -> Expectation:
        number = call.args[1]
        if not isinstance(number, (bool, int, float)):
            return Expectation(unit=True)
        if call.source.is_floating_point() and how in (eq, ne):
            # Computed fractions hit no given number; that none overflowed is taken for sure.
            return Expectation(share=float(how is ne), exact=number == inf, unit=True)
        return _holds(how, call.known, number)

    return compare


def _holds(how: Callable[[float, float], bool], known: Expectation, number: float) -> Expectation:
    """All or nothing of a constant holds in a comparison, a share of evenly spread values, what holds of masks."""
    if known.constant is not None:
        return Expectation(share=float(how(known.constant, number)), exact=True, unit=True)
    if known.values and isfinite(number):
        return Expectation(share=_holding(how, known.least, known.values, number), unit=True)
    # Masks have 0 and 1. Counts have 0 and what is not known, which is told from 0 but not from another number.
    if known.share is not None and (known.unit or (number in (0, 1) and how(1, number) == how(2, number))):
        if how(1, number) and not how(0, number):
            return replace(known, unit=True)
        if how(0, number) and not how(1, number):
            return _negated(known)
    return Expectation(unit=True)


def _holding(how: Callable[[float, float], bool], least: int, values: int, number: float) -> float:
    """The share of the numbers ``least, least + 1, ...`` for which a comparison holds."""
    last = least + values - 1
    if how in (eq, ne):
        hit = least <= number <= last and number == int(number)
        share = 1 / values if hit else 0.0
        return share if how is eq else 1 - share
    below = min(values, max(0, ceil(number) - least))  # those less than the number
    within = min(values, max(0, floor(number) - least + 1))  # those not greater
    if how in (lt, le):
        return (below if how is lt else within) / values
    return (values - below if how is ge else values - within) / values


def _equal_tensor(call: ExpectedCall) -> Expectation:
    """An index compared with all that it may be (``index[..., None] == arange``) is one-hot."""
    if _itself(call):
        return Expectation(share=1.0, exact=True, unit=True)
    first, second = call.known.values, call.look(call.args[1]).values
    values = max(filter(None, (first, second)), default=None)
    if values is None:
        return Expectation(unit=True)
    one_hot = values in (call.source.shape[-1:] + call.args[1].shape[-1:]) and first is not None
    return Expectation(share=1 / values, exact=one_hot, unit=True)


def _not_equal_tensor(call: ExpectedCall) -> Expectation:
    return Expectation(share=0.0, exact=True, unit=True) if _itself(call) else Expectation(unit=True)


def _itself(call: ExpectedCall) -> bool:
    """Whether a tensor is compared with itself: only what is no number differs (``isnan``, ``isfinite``)."""
    other = call.args[1]
    return (
        isinstance(other, torch.Tensor)
        and other.untyped_storage()._cdata == call.source.untyped_storage()._cdata
        and (other.shape, other.stride()) == (call.source.shape, call.source.stride())
        and other.storage_offset() == call.source.storage_offset()
    )


def _negated(found: Expectation) -> Expectation:
    share = None if found.share is None else 1 - found.share
    return Expectation(share=share, exact=found.exact, unit=True, negated=not found.negated)


def _not(call: ExpectedCall) -> Expectation | None:
    if call.out.dtype is not torch.bool:
        return None
    return _negated(call.known)


def _subtracted(call: ExpectedCall) -> Expectation:
    """``1 - mask``."""
    return _negated(call.known) if call.known.unit and call.args[1] == 1 else NOTHING


def _summed(call: ExpectedCall) -> Expectation:
    """Counts of what holds along a dimension: 0 only where nothing does."""
    if not (call.known.unit or call.source.dtype is torch.bool) or not call.out.numel():
        return NOTHING
    share = 0.5 if call.known.share is None else call.known.share
    return Expectation(share=1 - (1 - share) ** (call.source.numel() // call.out.numel()))


def _every(call: ExpectedCall) -> Expectation:
    """Whether all hold along a dimension."""
    if not (call.known.unit or call.source.dtype is torch.bool) or not call.out.numel():
        return NOTHING
    share = 0.5 if call.known.share is None else call.known.share
    return Expectation(
        share=share ** (call.source.numel() // call.out.numel()),
        exact=call.known.exact and share in (0, 1),
        unit=True,
    )


def _binned(call: ExpectedCall) -> Expectation:
    """Counts of each value: 0 only where none fell."""
    bins = call.out.numel()
    if not bins:
        return NOTHING
    total = None if len(call.args) > 1 and call.args[1] is not None else call.source.numel()  # weights
    return Expectation(share=1 - (1 - 1 / bins) ** call.source.numel(), total=total)


def _both(call: ExpectedCall) -> Expectation | None:
    found = [call.look(a) for a in call.args[:2] if isinstance(a, torch.Tensor)]
    if call.out.dtype is not torch.bool or len(found) < 2:
        return None
    share = prod(0.5 if known.share is None else known.share for known in found)
    sure = [known.exact and known.share in (0, 1) for known in found]
    none = any(known.exact and known.share == 0 for known in found)
    mosts = [
        known.at_most
        for a, known in zip(call.args[:2], found, strict=True)
        if known.at_most is not None and a.numel() == call.out.numel()
    ]
    return Expectation(share=share, exact=none or all(sure), unit=True, most=min(mosts, default=None))


def _either(call: ExpectedCall) -> Expectation | None:
    found = [(a.numel(), call.look(a)) for a in call.args[:2] if isinstance(a, torch.Tensor)]
    if len(found) < 2:
        return None
    mosts = [known.at_most for n, known in found if n == call.out.numel() and known.at_most is not None]
    most = sum(mosts) if len(mosts) == len(found) else None
    if call.out.dtype is not torch.bool and most is None:
        return None
    share = 1 - prod(1 - (0.5 if known.share is None else known.share) for _, known in found)
    unit = all(known.unit for _, known in found) or call.out.dtype is torch.bool
    return Expectation(share=share, unit=unit, most=None if most is None else min(call.out.numel(), most))


def _among(call: ExpectedCall) -> Expectation:
    """Few tokens looked for among others: made-up ones are never those that end a text."""
    return Expectation(share=0.0 if call.out.numel() <= _FEW else None, unit=True)


def _constant(value: Any, dtype: torch.dtype = torch.int64) -> Expectation:
    if not isinstance(value, (bool, int, float)) or not isfinite(value):
        return NOTHING
    number = int(bool(value) if dtype is torch.bool else value)
    return Expectation(share=float(number != 0), exact=True, unit=number in (0, 1), constant=number)


def _full(call: ExpectedCall) -> Expectation:
    return _constant(call.args[1] if len(call.args) > 1 else call.kwargs.get("fill_value"), call.out.dtype)


def _filled(call: ExpectedCall) -> Expectation:
    return _constant(call.args[1], call.out.dtype)


def _arange(call: ExpectedCall) -> Expectation | None:
    return Expectation(values=max(1, call.out.numel())) if call.out.dtype in _INTEGERS else None


def _range(call: ExpectedCall) -> Expectation | None:
    """Numbers from a start on, one by one; where they are further apart nothing is expected."""
    step = call.args[2] if len(call.args) > 2 else 1
    if call.out.dtype not in _INTEGERS or step != 1:
        return None
    return Expectation(values=max(1, call.out.numel()), least=int(call.args[0]))


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all elements of its storage, rather than viewing a part of them."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


_TABLE: dict[tuple[str, ...], tuple[int, Rule | Expectation]] = {
    ("argmax", "argmin"): (0, _axis_values),
    ("argsort", "argsort.stable"): (0, _last_axis),
    ("topk",): (1, _topk),
    ("sort", "sort.stable"): (1, _last_axis),
    ("max.dim", "min.dim"): (1, _axis_values),
    ("multinomial",): (0, _multinomial),
    ("randint", "randint.generator"): (0, _randint),
    ("randint.low", "randint.low_generator"): (0, _randint_low),
    ("arange",): (0, _arange),
    ("arange.start", "arange.start_step"): (0, _range),
    ("clone", "expand_copy", "repeat", "flip", "roll"): (0, _same),
    ("index.Tensor", "index_select"): (0, _picked),
    ("index_put", "index_put_", "_index_put_impl_"): (0, _put),
    ("index_fill.int_Scalar", "index_fill_.int_Scalar"): (0, _fill_places),
    ("index_fill.int_Tensor", "index_fill_.int_Tensor"): (0, _fill_places),
    ("cat",): (0, _joined),
    ("_to_copy",): (0, _cast),
    ("copy_",): (0, _copied),
    ("scatter_.value", "scatter.value"): (0, _one_hot_scatter),
    ("eq.Scalar",): (0, _compared(eq)),
    ("eq.Tensor",): (0, _equal_tensor),
    ("ne.Scalar",): (0, _compared(ne)),
    ("lt.Scalar",): (0, _compared(lt)),
    ("le.Scalar",): (0, _compared(le)),
    ("gt.Scalar",): (0, _compared(gt)),
    ("ge.Scalar",): (0, _compared(ge)),
    ("ne.Tensor",): (0, _not_equal_tensor),
    ("isnan", "isinf", "isposinf", "isneginf"): (0, Expectation(share=0.0, exact=True, unit=True)),
    ("isfinite",): (0, Expectation(share=1.0, exact=True, unit=True)),
    ("all.dim", "all.dims"): (0, _every),
    ("lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor"): (0, Expectation(unit=True)),
    ("sum", "sum.dim_IntList", "any.dim", "any.dims", "count_nonzero.dim_IntList"): (0, _summed),
    ("bincount", "histc"): (0, _binned),
    ("logical_not", "bitwise_not"): (0, _not),
    ("rsub.Scalar",): (0, _subtracted),
    ("logical_and", "bitwise_and.Tensor", "mul.Tensor"): (0, _both),
    ("logical_or", "bitwise_or.Tensor"): (0, _either),
    ("isin.Tensor_Tensor", "isin.Tensor_Scalar"): (0, _among),
    ("ones", "ones_like", "new_ones"): (0, _constant(1)),
    ("zeros", "zeros_like", "new_zeros", "zero_"): (0, _constant(0)),
    ("full", "full_like"): (0, _full),
    ("fill_.Scalar",): (0, _filled),
}
_RULES: dict[OpOverload, tuple[int, Rule | Expectation]] = {}
for _names, _entry in _TABLE.items():
    for _name in _names:
        _packet, _, _overload = _name.partition(".")
        _op = getattr(getattr(_aten, _packet, None), _overload or "default", None)
        if isinstance(_op, OpOverload):
            _RULES[_op] = _entry
