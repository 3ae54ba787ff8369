"""Plausible values for small results that nobody computed: counts, indices of rankings, answers, numbers.

Programs split tensors by counts (how many elements of a mask hold, how many tokens went to each expert), so guessed
ones sum to what is counted. The indices of one ranking (``topk``, ``sort``) differ from each other, as those of a card
do. A choice among few (experts, classes) is spread evenly; one among many (a vocabulary) is the same for each row and
keeps away from both ends, where vocabularies keep their special tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.options.assume_choice import Assume
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.data_dependent.expectations import Expectation
from vramfit.virtual.op_call import OpCall

_aten = torch.ops.aten
_SUMS = {
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.count_nonzero.default,
    _aten.count_nonzero.dim_IntList,
}
_HISTOGRAMS = {_aten.bincount.default, _aten.histc.default}
_HIGHEST = {_aten.max.default, _aten.amax.default, _aten.max.dim}

COUNTING = frozenset((_aten.histc.default,))
"""Ops that count in floating point."""

_AXIS_AT = {_aten.topk.default: 2, _aten.sort.default: 1, _aten.argsort.default: 1}
_RANKINGS = {
    _aten.topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.argsort.default,
    _aten.argsort.stable,
}
_FEW = 512
_INDEX_OPS = {
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.multinomial.default,
    _aten.max.dim,
    _aten.min.dim,
    _aten.argsort.default,
}
_TRUE_OPS = {
    _aten.isfinite.default,
    _aten.all.default,
    _aten.all.dim,
    _aten._is_all_true.default,  # torch.distributions asks it of every argument
    _aten.eq.Tensor,
    _aten.isclose.default,
}
_SECOND_IS_COUNT = (_aten.topk.default, _aten.multinomial.default)


def counts(
    call: OpCall,
    out: torch.Tensor,
    expected: Callable[[torch.Tensor], Expectation],
    assume: Assume,
) -> tuple[torch.Tensor, Extent | None] | None:
    """Plausible values for the small result of an op that counts; None for other ops.

    Args:
        call: the op, whose first argument is a tensor without values.
        out: the result whose values are wanted.
        expected: gives what is expected of an argument.

    Returns:
        The values, and between which bounds each of them could lie; no bounds for those that are sure.
    """
    func, source = call.func, call.args[0] if call.args else None
    if not isinstance(source, torch.Tensor) or not out.numel():
        return None
    if func in _HISTOGRAMS:
        return _spread(source.numel(), out, source.numel())
    known = expected(source)
    if func in _SUMS:
        return _sum(source, known, out, assume)
    if func in _HIGHEST and known.values:
        return torch.full(out.shape, known.least + known.values - 1, dtype=out.dtype, device="cpu"), None
    return None


def _sum(
    source: torch.Tensor, known: Expectation, out: torch.Tensor, assume: Assume
) -> tuple[torch.Tensor, Extent | None] | None:
    elements, each = source.numel(), source.numel() // out.numel()
    if known.constant is not None:
        return torch.full(out.shape, known.constant * each, dtype=out.dtype, device="cpu"), None
    if source.dtype is torch.bool or known.unit:
        certain = known.exact or known.share == 0
        most = elements if known.at_most is None or not known.unit else min(elements, known.at_most)
        total = most if assume is Assume.UPPER and not certain else min(most, known.count(elements))
        return _spread(total, out, None if certain and out.numel() == 1 else min(each, most))
    if known.values:
        highest = known.least + known.values - 1
        mean = highest if assume is Assume.UPPER else (known.least + highest) / 2
        return _spread(int(elements * mean), out, highest * each)
    return None


def _spread(total: int, out: torch.Tensor, most: int | None) -> tuple[torch.Tensor, Extent | None]:
    """A total spread evenly, and how much each could be; ``most`` of None says that it is sure."""
    each = total // out.numel()
    return evenly(total, out), None if most is None else Extent(each, 0, max(most, each))


def evenly(total: int, out: torch.Tensor) -> torch.Tensor:
    """As equal whole numbers as sum to a total."""
    each, more = divmod(total, out.numel())
    values = torch.full((out.numel(),), each, dtype=torch.int64, device="cpu")
    values[:more] += 1
    return values.reshape(out.shape).to(out.dtype)


def ranks(call: OpCall, out: torch.Tensor) -> torch.Tensor | None:
    """Plausible indices for the small result of a ranking; None for other ops.

    Args:
        call: the op, whose first argument is a tensor without values.
        out: the result that holds the indices.
    """
    func, args = call.func, call.args
    source = args[0] if args else None
    if func not in _RANKINGS or not isinstance(source, torch.Tensor) or not source.dim() or not out.numel():
        return None
    at = _AXIS_AT.get(func, len(args))
    axis = call.kwargs.get("dim", args[at] if len(args) > at else -1) % source.dim()
    choices, taken = source.shape[axis], out.shape[axis]
    rows = out.numel() // taken
    first = torch.full((rows, 1), choices // 3, device="cpu")
    if choices <= _FEW:
        first = first + torch.arange(rows, device="cpu").unsqueeze(1) * taken
    values = (first + torch.arange(taken, device="cpu")) % choices
    others = [size for dimension, size in enumerate(out.shape) if dimension != axis]
    shaped: torch.Tensor = values.reshape(*others, taken).movedim(-1, axis).to(out.dtype)
    return shaped


def guess_value(func: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> float | int | bool:
    """A plausible value for results that nobody computed.

    Indices lie a third of the way into their range: neither 0, 1, 2 nor the last entry, where vocabularies keep their
    end-of-sequence tokens. Questions whose usual answer is yes (finite, equal, all) get yes, others no. Sums and
    losses are 1.
    """
    if dtype is torch.bool:
        return func in _TRUE_OPS
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0
    if func in _INDEX_OPS and isinstance(args[0], torch.Tensor) and args[0].dim():
        named = len(args) > 1 and isinstance(args[1], int) and func not in _SECOND_IS_COUNT
        return args[0].shape[args[1] if named else -1] // 3
    return 1
