"""Dropout, sampling, and filling with random numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, both, forward, rand, short


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.RANDOM)
    for dtype in (torch.float32, torch.bfloat16):
        grid.add(f"dropout/4096x1024/{short(dtype)}", partial(_dropout, F.dropout, dtype))
        grid.add(f"alpha_dropout/4096x1024/{short(dtype)}", partial(_dropout, F.alpha_dropout, dtype))
        grid.add(
            f"randn/1000x1000/{short(dtype)}",
            partial(forward, torch.randn, 1000, 1000, device="cuda", dtype=dtype),
        )
    grid.add("dropout2d/8x64x32x32", lambda: both(F.dropout2d, rand(8, 64, 32, 32, grad=True), 0.1, True))
    for rows, categories, samples in ((1, 50_257, 1), (64, 32_000, 1), (16, 1000, 100), (1, 100_000, 1000)):
        for again in (False, True):
            grid.add(
                f"multinomial/{rows}x{categories}/{samples}/{'with' if again else 'without'} replacement",
                partial(_multinomial, rows, categories, samples, again),
            )
    for count in (1000, 20_000, 60_000, 1_000_000):
        grid.add(f"randperm/{count}", partial(forward, torch.randperm, count, device="cuda"))
    grid.add(
        "bernoulli/1000x1000",
        lambda: forward(torch.bernoulli, torch.full((1000, 1000), 0.3, device="cuda")),
    )
    grid.add("normal/1000x1000", lambda: forward(rand(1000, 1000).normal_))
    grid.add("gumbel_softmax/64x1000", lambda: both(F.gumbel_softmax, rand(64, 1000, grad=True)))
    return grid.cases


def _dropout(function: Any, dtype: torch.dtype) -> Run:
    return both(function, rand(4096, 1024, dtype=dtype, grad=True), 0.1, True)


def _multinomial(rows: int, categories: int, samples: int, again: bool) -> Run:
    return forward(torch.multinomial, torch.ones(rows, categories, device="cuda"), samples, again)
