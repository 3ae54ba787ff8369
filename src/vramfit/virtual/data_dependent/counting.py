"""Guesses at counts: how many elements of a mask hold, how many tokens went to each expert.

Programs split tensors by such counts, so guessed ones sum to what is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vramfit.virtual.data_dependent.assume import Assume, Extent
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
        assume: whether the most or the usual is wanted.

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
