"""Sums, extremes, norms and moments: where one output is spread over several blocks, and where not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, forward, rand, short

_SHAPES = (
    (1000,),
    (100_000,),
    (5_000_000,),
    (64, 4096),
    (100_000, 8),
    (8, 100_000),
    (32, 64, 56, 56),
)
_OPS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "amax": torch.amax,
    "argmax": torch.argmax,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
}


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.REDUCTION)
    for shape in _SHAPES:
        name = "x".join(map(str, shape))
        for op, function in _OPS.items():
            for dtype in (torch.float32, torch.bfloat16):
                if dtype is torch.bfloat16 and op != "sum":
                    continue
                grid.add(f"{op}/{name}/{short(dtype)}", partial(_all, function, shape, dtype))
                if len(shape) == 2:
                    for axis in (0, 1):
                        grid.add(
                            f"{op}/{name}/{axis}/{short(dtype)}",
                            partial(_along, function, shape, axis, dtype),
                        )
    grid.add("sum/32x64x56x56/but channels", partial(_but_channels, False))
    grid.add("sum/32x64x56x56/but channels/channels last", partial(_but_channels, True))
    grid.add("max with indices/64x50257", _max_indices)
    grid.add("any/1000000", _any)
    grid.add("prod/100000", _prod)
    grid.add("logsumexp/64x50257", _logsumexp)
    grid.add("std_mean/4096x64/0", _std_mean)
    grid.add("count_nonzero/100000", _count_nonzero)
    return grid.cases


def _all(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Run:
    return forward(function, rand(*shape, dtype=dtype))


def _along(function: Callable[..., Any], shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> Run:
    return forward(function, rand(*shape, dtype=dtype), dim=axis)


def _but_channels(last: bool) -> Run:
    x = rand(32, 64, 56, 56)
    return forward(torch.sum, x.contiguous(memory_format=torch.channels_last) if last else x, dim=(0, 2, 3))


def _max_indices() -> Run:
    return forward(torch.max, rand(64, 50_257), dim=1)


def _any() -> Run:
    return forward(torch.any, rand(1_000_000) > 9)


def _prod() -> Run:
    return forward(torch.prod, rand(100_000))


def _logsumexp() -> Run:
    return forward(torch.logsumexp, rand(64, 50_257), 1)


def _std_mean() -> Run:
    return forward(torch.std_mean, rand(4096, 64), dim=0)


def _count_nonzero() -> Run:
    return forward(torch.count_nonzero, rand(100_000))
