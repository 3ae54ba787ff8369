"""Normalisation: batch, layer, RMS, group, instance; wide, tall, strided."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, channels_last, module, rand, short

_BATCHED: tuple[tuple[int, ...], ...] = ((32, 64, 56, 56), (8, 512, 7, 7), (2, 32, 16, 16, 16), (256, 128))
_GROUPED: tuple[tuple[tuple[int, ...], int], ...] = (
    ((8, 320, 64, 64), 32),
    ((2, 64, 32, 32, 32), 8),
    ((4, 512, 1500), 1),
    ((4, 48, 9, 9), 48),
)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.NORM)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width in (
            (64, 768),
            (4096, 4096),
            (65_536, 64),
            (65_600, 64),
            (200_000, 96),
            (70_000, 4000),
        ):
            grid.add(f"layer/{rows}x{width}/{short(dtype)}", partial(_layer, rows, width, dtype))
            grid.add(f"rms/{rows}x{width}/{short(dtype)}", partial(_rms, rows, width, dtype))
        grid.add(f"layer/2048x512/strided/{short(dtype)}", partial(_layer, 2048, 512, dtype, strided=True))
    for dtype in (torch.float32, torch.float16):
        for shape in _BATCHED:
            name = "x".join(map(str, shape))
            grid.add(f"batch/{name}/{short(dtype)}", partial(_batch, shape, dtype))
            if len(shape) == 4:
                grid.add(
                    f"batch/{name}/channels last/{short(dtype)}",
                    partial(_batch, shape, dtype, last=True),
                )
    grid.add(
        "batch/32x64x56x56/fp32/no cudnn", partial(_batch, (32, 64, 56, 56), torch.float32), Flag.NO_CUDNN
    )
    grid.add(
        "batch/32x64x56x56/evaluating/fp32", partial(_batch, (32, 64, 56, 56), torch.float32, training=False)
    )
    for dtype in (torch.float32, torch.bfloat16):
        for shape, groups in _GROUPED:
            name = "x".join(map(str, shape))
            grid.add(f"group/{name}/{groups}/{short(dtype)}", partial(_group, shape, groups, dtype))
        grid.add(
            f"group/8x320x64x64/channels last/{short(dtype)}",
            partial(_group, (8, 320, 64, 64), 32, dtype, last=True),
        )
        grid.add(f"instance/4x32x64x64/{short(dtype)}", partial(_instance, dtype))
    return grid.cases


def _layer(rows: int, width: int, dtype: torch.dtype, *, strided: bool = False) -> Run:
    layer = nn.LayerNorm(width, device="cuda", dtype=dtype)
    x = rand(width, rows, dtype=dtype).t() if strided else rand(rows, width, dtype=dtype)
    return module(layer, x.requires_grad_())


def _rms(rows: int, width: int, dtype: torch.dtype) -> Run:
    return module(nn.RMSNorm(width, device="cuda", dtype=dtype), rand(rows, width, dtype=dtype, grad=True))


def _batch(shape: tuple[int, ...], dtype: torch.dtype, *, last: bool = False, training: bool = True) -> Run:
    kind = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    layer = kind(shape[1], device="cuda").train(training)
    x = rand(*shape, dtype=dtype)
    return module(layer, (channels_last(x) if last else x).requires_grad_())


def _group(shape: tuple[int, ...], groups: int, dtype: torch.dtype, *, last: bool = False) -> Run:
    layer = nn.GroupNorm(groups, shape[1], device="cuda", dtype=dtype)
    x = rand(*shape, dtype=dtype)
    return module(layer, (channels_last(x) if last else x).requires_grad_())


def _instance(dtype: torch.dtype) -> Run:
    layer = nn.InstanceNorm2d(32, affine=True, device="cuda", dtype=dtype)
    return module(layer, rand(4, 32, 64, 64, dtype=dtype, grad=True))
