"""Linear algebra: factorisations and solvers of cuSOLVER, cuBLAS and MAGMA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, both, forward, rand

_SIZES = ((1, 64), (1, 1024), (32, 16))


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.LINALG)
    for batch, size in _SIZES:
        for name, (function, definite) in _OPS.items():
            grid.add(
                f"{name}/{batch}x{size}x{size}",
                partial(_square, function, definite, batch, size),
                Flag.UNTIMED,
            )
    grid.add("lstsq/500x100", _lstsq, Flag.UNTIMED)
    grid.add("solve/256/backward", _solve_backward, Flag.UNTIMED)
    grid.add(
        "cdist/500x500x64", lambda: both(torch.cdist, rand(500, 64, grad=True), rand(500, 64, grad=True))
    )
    grid.add("matrix_exp/8x64", lambda: forward(torch.linalg.matrix_exp, 0.1 * rand(8, 64, 64)), Flag.UNTIMED)
    return grid.cases


def _square(function: Callable[..., Any], definite: bool, batch: int, size: int) -> Run:
    matrix = rand(batch, size, size) if batch > 1 else rand(size, size)
    if definite:
        matrix = matrix @ matrix.mT + size * torch.eye(size, device="cuda")
    return forward(function, matrix)


_OPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "cholesky": (torch.linalg.cholesky, True),
    "inv": (torch.linalg.inv, True),
    "solve": (lambda a: torch.linalg.solve(a, a[..., :1]), True),
    "qr": (torch.linalg.qr, False),
    "lu_factor": (torch.linalg.lu_factor, False),
    "eigh": (torch.linalg.eigh, True),
    "svdvals": (torch.linalg.svdvals, False),
    "svd": (torch.linalg.svd, False),
    "det": (torch.linalg.det, False),
    "triangular": (lambda a: torch.linalg.solve_triangular(a, a, upper=True), False),
}


def _lstsq() -> Run:
    return forward(lambda a, b: torch.linalg.lstsq(a, b).solution, rand(500, 100), rand(500, 3))


def _solve_backward() -> Run:
    left = rand(256, 256) + 256 * torch.eye(256, device="cuda")
    return both(torch.linalg.solve, left.requires_grad_(), rand(256, 4, grad=True))
