"""Embedding tables and bags, forward and backward, across the thresholds of their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, integers, rand, short

_COUNTS = (3072, 3073, 4096, 32_768, 200_000)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.EMBEDDING)
    for dtype in (torch.float32, torch.bfloat16):
        for count in _COUNTS:
            for rows, width in ((50_257, 768), (32, 64), (1000, 100)):
                if dtype is torch.bfloat16 and rows == 1000:
                    continue
                grid.add(
                    f"{count} of {rows}x{width}/{short(dtype)}",
                    partial(_embedding, count, rows, width, dtype),
                    priority=0 if (count, rows) == (4096, 50_257) else 1,
                )
    grid.add(
        "4096 of 1000x64/by frequency",
        partial(_embedding, 4096, 1000, 64, torch.float32, scale_grad_by_freq=True),
    )
    grid.add("4096 of 1000x64/padding", partial(_embedding, 4096, 1000, 64, torch.float32, padding_idx=0))
    grid.add("4096 of 1000x64/int32", partial(_embedding, 4096, 1000, 64, torch.float32, index=torch.int32))
    grid.add(
        "4096 of 32x64/deterministic", partial(_embedding, 4096, 32, 64, torch.float32), Flag.DETERMINISTIC
    )
    grid.add("4096 of 1000x64/renormed", partial(_embedding, 4096, 1000, 64, torch.float32, max_norm=1.0))
    for mode in ("sum", "mean", "max"):
        for count in (1024, 16_384):
            grid.add(f"bag/{mode}/{count} of 5000x64", partial(_bag, mode, count))
    return grid.cases


def _embedding(
    count: int, rows: int, width: int, dtype: torch.dtype, *, index: torch.dtype = torch.int64, **options: Any
) -> Run:
    table = rand(rows, width, dtype=dtype, grad=True)
    positions = integers(rows, count, dtype=index)
    grad = rand(count, width, dtype=dtype)

    def run() -> object:
        if "max_norm" in options:  # writes the table in place, which autograd does not want to see
            with torch.no_grad():
                return F.embedding(positions, table, **options)
        return torch.autograd.grad(F.embedding(positions, table, **options), table, grad)

    return run


def _bag(mode: str, count: int) -> Run:
    table, positions = rand(5000, 64, grad=True), integers(5000, count // 8, 8)

    def run() -> object:
        out = F.embedding_bag(positions, table, mode=mode)
        return torch.autograd.grad(out, table, torch.ones_like(out))

    return run
