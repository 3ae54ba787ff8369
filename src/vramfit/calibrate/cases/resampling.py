"""Pooling, interpolation, padding, grid sampling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, both, channels_last, rand, short

_MODES = {
    "nearest": 4,
    "bilinear": 4,
    "bicubic": 4,
    "linear": 3,
    "trilinear": 5,
    "area": 4,
    "nearest-exact": 4,
}
_SHAPES = {3: (8, 32, 500), 4: (8, 32, 48, 48), 5: (2, 16, 24, 24, 24)}


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.RESAMPLING)
    for mode, rank in _MODES.items():
        for factor in (2.0, 0.5):
            for dtype in (torch.float32, torch.bfloat16) if mode == "bilinear" else (torch.float32,):
                grid.add(
                    f"interpolate/{mode}/{factor}/{short(dtype)}",
                    partial(_interpolate, mode, rank, factor, dtype),
                )
    grid.add(
        "interpolate/bilinear/antialias",
        partial(_interpolate, "bilinear", 4, 0.5, torch.float32, antialias=True),
    )
    grid.add(
        "interpolate/bilinear/channels last",
        partial(_interpolate, "bilinear", 4, 2.0, torch.float32, last=True),
    )
    for name, function, arguments, rank in _POOLS:
        grid.add(f"{name}/{rank - 2}d", partial(_pool, function, arguments, rank, False))
        if rank == 4:
            grid.add(f"{name}/{rank - 2}d/channels last", partial(_pool, function, arguments, rank, True))
    for mode in ("constant", "reflect", "replicate", "circular"):
        grid.add(f"pad/{mode}", partial(_pad, mode))
    for mode in ("bilinear", "nearest"):
        grid.add(f"grid_sample/{mode}", partial(_grid_sample, mode))
    grid.add("unfold/3", lambda: both(F.unfold, rand(*_SHAPES[4], grad=True), 3))
    grid.add("fold/3", lambda: both(F.fold, rand(8, 32 * 9, 46 * 46, grad=True), (48, 48), 3))
    grid.add("pixel_shuffle/2", lambda: both(F.pixel_shuffle, rand(*_SHAPES[4], grad=True), 2))
    return grid.cases


def _interpolate(
    mode: str, rank: int, factor: float, dtype: torch.dtype, *, last: bool = False, **options: Any
) -> Run:
    x = rand(*_SHAPES[rank], dtype=dtype)
    return both(
        F.interpolate,
        (channels_last(x) if last else x).requires_grad_(),
        scale_factor=factor,
        mode=mode,
        **options,
    )


_POOLS: tuple[tuple[str, Any, tuple[Any, ...], int], ...] = (
    ("max_pool", F.max_pool1d, (2,), 3),
    ("max_pool", F.max_pool2d, (3, 2, 1), 4),
    ("max_pool", F.max_pool3d, (2,), 5),
    ("avg_pool", F.avg_pool1d, (2,), 3),
    ("avg_pool", F.avg_pool2d, (3, 2, 1), 4),
    ("avg_pool", F.avg_pool3d, (2,), 5),
    ("adaptive_avg_pool", F.adaptive_avg_pool2d, (1,), 4),
    ("adaptive_avg_pool to 7", F.adaptive_avg_pool2d, (7,), 4),
    ("adaptive_max_pool", F.adaptive_max_pool2d, (7,), 4),
    ("adaptive_avg_pool", F.adaptive_avg_pool3d, (2,), 5),
)


def _pool(function: Any, arguments: tuple[Any, ...], rank: int, last: bool) -> Run:
    x = rand(*_SHAPES[rank])
    return both(function, (channels_last(x) if last else x).requires_grad_(), *arguments)


def _pad(mode: str) -> Run:
    return both(F.pad, rand(*_SHAPES[4], grad=True), (1, 2, 3, 4), mode)


def _grid_sample(mode: str) -> Run:
    return both(
        F.grid_sample,
        rand(*_SHAPES[4], grad=True),
        (rand(8, 30, 30, 2).tanh()).requires_grad_(),
        mode=mode,
        align_corners=False,
    )
