"""Sums, extremes, norms and moments: where one output is spread over several blocks, and where not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, channels_last, forward, rand, short

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
                grid.add(f"{op}/{name}/{short(dtype)}", partial(_reduce, function, shape, dtype))
                if len(shape) == 2:
                    for axis in (0, 1):
                        grid.add(
                            f"{op}/{name}/{axis}/{short(dtype)}",
                            partial(_reduce, function, shape, dtype, dim=axis),
                        )
    grid.add("sum/32x64x56x56/but channels", partial(_but_channels, False))
    grid.add("sum/32x64x56x56/but channels/channels last", partial(_but_channels, True))
    grid.add("max with indices/64x50257", lambda: forward(torch.max, rand(64, 50_257), dim=1))
    grid.add("any/1000000", lambda: forward(torch.any, rand(1_000_000) > 9))
    grid.add("prod/100000", lambda: forward(torch.prod, rand(100_000)))
    grid.add("logsumexp/64x50257", lambda: forward(torch.logsumexp, rand(64, 50_257), 1))
    grid.add("std_mean/4096x64/0", lambda: forward(torch.std_mean, rand(4096, 64), dim=0))
    grid.add("count_nonzero/100000", lambda: forward(torch.count_nonzero, rand(100_000)))
    return grid.cases


def _reduce(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, **dim: int) -> Run:
    return forward(function, rand(*shape, dtype=dtype), **dim)


def _but_channels(last: bool) -> Run:
    x = rand(32, 64, 56, 56)
    return forward(torch.sum, channels_last(x) if last else x, dim=(0, 2, 3))
