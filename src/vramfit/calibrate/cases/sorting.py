"""Sorting, selecting by rank, scanning, and counting: CUB's storage across the thresholds of its callers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, forward, integers, rand, short

_SORTED = (
    (1, 1000),
    (64, 4096),
    (64, 4097),
    (1, 100_000),
    (100, 50_000),
    (200, 8192),
    (4, 1_000_000),
    (1, 3_000_000),
)
_TOP = ((1, 50_257, 50), (8, 128_256, 50), (64, 50_257, 5), (512, 2000, 10), (1, 10_000, 5000), (16, 300, 8))


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.SORTING)
    for rows, length in _SORTED:
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            if dtype is torch.bfloat16 and length > 100_000:
                continue
            grid.add(f"sort/{rows}x{length}/{short(dtype)}", partial(_sort, rows, length, dtype))
    grid.add("sort/stable/64x8000", lambda: forward(torch.sort, rand(64, 8000), stable=True))
    grid.add("sort/by columns/8000x64", lambda: forward(torch.sort, rand(8000, 64), dim=0))
    grid.add("argsort/16x5000", lambda: forward(torch.argsort, rand(16, 5000)))
    for rows, length, k in _TOP:
        for dtype in (torch.float32, torch.bfloat16):
            grid.add(f"topk/{rows}x{length}/{k}/{short(dtype)}", partial(_topk, rows, length, k, dtype))
    for rows, length in ((64, 1000), (1, 100_000), (512, 50_257)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for axis in (0, 1):
                grid.add(
                    f"cumsum/{rows}x{length}/{axis}/{short(dtype)}",
                    partial(_cumsum, rows, length, axis, dtype),
                )
    for count in (1000, 100_000, 3_000_000):
        grid.add(f"cumsum/flat/{count}", partial(_cumsum, count, 0, 0, torch.float32))
        grid.add(f"unique/{count}", partial(_unique, count))
        grid.add(f"unique/counts/{count}", partial(_unique, count, inverse=True))
        for name, make in _COUNTED.items():
            grid.add(f"{name}/{count}", partial(make, count))
    grid.add("cummax/256x1000", lambda: forward(torch.cummax, rand(256, 1000), 1))
    grid.add("logcumsumexp/256x1000", lambda: forward(torch.logcumsumexp, rand(256, 1000), 1))
    grid.add("cumprod/256x1000", lambda: forward(torch.cumprod, rand(256, 1000), 1))
    grid.add("mode/64x5000", lambda: forward(torch.mode, integers(100, 64, 5000)))
    grid.add("quantile/10000", lambda: forward(torch.quantile, rand(10_000), 0.9))
    grid.add(
        "unique/rows/2000x4",
        lambda: forward(torch.unique, torch.arange(8000, device="cuda").reshape(2000, 4), dim=0),
    )
    return grid.cases


def _values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return rand(*shape, dtype=dtype) if dtype.is_floating_point else integers(1 << 20, *shape, dtype=dtype)


def _sort(rows: int, length: int, dtype: torch.dtype) -> Run:
    return forward(torch.sort, _values(rows, length, dtype=dtype))


def _topk(rows: int, length: int, k: int, dtype: torch.dtype) -> Run:
    return forward(torch.topk, rand(rows, length, dtype=dtype), k)


def _cumsum(rows: int, length: int, axis: int, dtype: torch.dtype) -> Run:
    shape = (rows, length) if length else (rows,)
    return forward(torch.cumsum, _values(*shape, dtype=dtype), axis)


def _unique(count: int, *, inverse: bool = False) -> Run:
    distinct = torch.arange(count, device="cuda").flip(0)  # all different: as many as there can be
    return forward(torch.unique, distinct, return_inverse=inverse, return_counts=inverse)


_COUNTED: dict[str, Callable[[int], Run]] = {
    "unique_consecutive": lambda n: forward(
        torch.unique_consecutive, torch.arange(n, device="cuda"), return_counts=True
    ),
    "bincount": lambda n: forward(torch.bincount, integers(64, n), minlength=64),
    "histc": lambda n: forward(torch.histc, rand(n), bins=64, min=-4, max=4),
    "searchsorted": lambda n: forward(torch.searchsorted, torch.arange(1000.0, device="cuda"), rand(n)),
    "median": lambda n: forward(torch.median, rand(n)),
    "kthvalue": lambda n: forward(torch.kthvalue, rand(n), 7),
}
