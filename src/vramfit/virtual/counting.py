"""Guesses at counts: how many elements of a mask hold, how many tokens went to each expert.

Programs split tensors by such counts, so guessed ones sum to what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.virtual.assume import Assume
from vramfit.virtual.expectations import Expectation

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
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    out: torch.Tensor,
    expected: Callable[[torch.Tensor], Expectation],
    assume: Assume,
) -> torch.Tensor | None:
    """Plausible values for the small result of an op that counts; None for other ops.

    Args:
        func: the op.
        args: its arguments; the first is a tensor without values.
        out: its result, whose values are wanted.
        expected: gives what is expected of an argument.
        assume: whether the most or the usual is wanted.
    """
    source = args[0] if args else None
    if not isinstance(source, torch.Tensor) or not out.numel():
        return None
    if func in _HISTOGRAMS:
        return _evenly(source.numel(), out)
    known = expected(source)
    if func in _SUMS:
        return _sum(source, known, out, assume)
    if func in _HIGHEST and known.values:
        return torch.full(out.shape, known.values - 1, dtype=out.dtype)
    return None


def _sum(source: torch.Tensor, known: Expectation, out: torch.Tensor, assume: Assume) -> torch.Tensor | None:
    if source.dtype is torch.bool or known.unit:
        certain = known.exact or known.share == 0
        total = source.numel() if assume is Assume.UPPER and not certain else known.count(source.numel())
        return _evenly(total, out)
    if known.values:
        each = known.values - 1 if assume is Assume.UPPER else (known.values - 1) / 2
        return _evenly(int(source.numel() * each), out)
    return None


def _evenly(total: int, out: torch.Tensor) -> torch.Tensor:
    """As equal whole numbers as sum to a total."""
    each, more = divmod(total, out.numel())
    values = torch.full((out.numel(),), each, dtype=torch.int64)
    values[:more] += 1
    return values.reshape(out.shape).to(out.dtype)
