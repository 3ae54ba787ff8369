"""Sorting, selecting by rank, scanning, and counting: CUB's storage across the thresholds of its callers."""

from __future__ import annotations

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
    grid.add("sort/stable/64x8000", partial(_stable, 64, 8000))
    grid.add("sort/by columns/8000x64", partial(_columns, 8000, 64))
    grid.add("argsort/16x5000", partial(_argsort, 16, 5000))
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
        grid.add(f"unique_consecutive/{count}", partial(_consecutive, count))
        grid.add(f"bincount/{count}", partial(_bincount, count))
        grid.add(f"histc/{count}", partial(_histc, count))
        grid.add(f"searchsorted/{count}", partial(_searchsorted, count))
        grid.add(f"median/{count}", partial(_median, count))
        grid.add(f"kthvalue/{count}", partial(_kthvalue, count))
    grid.add("cummax/256x1000", _cummax)
    grid.add("logcumsumexp/256x1000", _logcumsumexp)
    grid.add("cumprod/256x1000", _cumprod)
    grid.add("mode/64x5000", _mode)
    grid.add("quantile/10000", _quantile)
    grid.add("unique/rows/2000x4", _unique_rows)
    return grid.cases


def _values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return rand(*shape, dtype=dtype) if dtype.is_floating_point else integers(1 << 20, *shape, dtype=dtype)


def _sort(rows: int, length: int, dtype: torch.dtype) -> Run:
    return forward(torch.sort, _values(rows, length, dtype=dtype))


def _stable(rows: int, length: int) -> Run:
    return forward(torch.sort, rand(rows, length), stable=True)


def _columns(rows: int, columns: int) -> Run:
    return forward(torch.sort, rand(rows, columns), dim=0)


def _argsort(rows: int, length: int) -> Run:
    return forward(torch.argsort, rand(rows, length))


def _topk(rows: int, length: int, k: int, dtype: torch.dtype) -> Run:
    return forward(torch.topk, rand(rows, length, dtype=dtype), k)


def _cumsum(rows: int, length: int, axis: int, dtype: torch.dtype) -> Run:
    shape = (rows, length) if length else (rows,)
    return forward(torch.cumsum, _values(*shape, dtype=dtype), axis)


def _cummax() -> Run:
    return forward(torch.cummax, rand(256, 1000), 1)


def _logcumsumexp() -> Run:
    return forward(torch.logcumsumexp, rand(256, 1000), 1)


def _cumprod() -> Run:
    return forward(torch.cumprod, rand(256, 1000), 1)


def _unique(count: int, *, inverse: bool = False) -> Run:
    distinct = torch.arange(count, device="cuda").flip(0)  # all different: as many as there can be
    return forward(torch.unique, distinct, return_inverse=inverse, return_counts=inverse)


def _unique_rows() -> Run:
    return forward(torch.unique, torch.arange(8000, device="cuda").reshape(2000, 4), dim=0)


def _consecutive(count: int) -> Run:
    return forward(torch.unique_consecutive, torch.arange(count, device="cuda"), return_counts=True)


def _bincount(count: int) -> Run:
    return forward(torch.bincount, integers(64, count), minlength=64)


def _histc(count: int) -> Run:
    return forward(torch.histc, rand(count), bins=64, min=-4, max=4)


def _searchsorted(count: int) -> Run:
    return forward(torch.searchsorted, torch.arange(1000.0, device="cuda"), rand(count))


def _median(count: int) -> Run:
    return forward(torch.median, rand(count))


def _kthvalue(count: int) -> Run:
    return forward(torch.kthvalue, rand(count), 7)


def _mode() -> Run:
    return forward(torch.mode, integers(100, 64, 5000))


def _quantile() -> Run:
    return forward(torch.quantile, rand(10_000), 0.9)
