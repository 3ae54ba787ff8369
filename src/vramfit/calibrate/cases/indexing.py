"""Reading and writing by index: gather, scatter, index_put, index_add, masks; deterministic as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, both, forward, integers, rand

_DETERMINISTIC = ("index_put", "index_put accumulate", "index_add", "scatter_add", "scatter", "index_copy")


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.INDEXING)
    for count in (100, 100_000):
        for name, make in _OPS.items():
            grid.add(f"{name}/{count}", partial(make, count))
            if name in _DETERMINISTIC:
                grid.add(f"{name}/{count}/deterministic", partial(make, count), Flag.DETERMINISTIC)
    return grid.cases


def _index_put(count: int, accumulate: bool = False) -> Run:
    target, index, values = rand(2000, 64), integers(2000, count), rand(count, 64)
    return forward(target.index_put_, (index,), values, accumulate=accumulate)


def _along(method: str, count: int) -> Run:
    """A write along the first dimension, of rows by one index each."""
    return forward(getattr(rand(2000, 64), method), 0, integers(2000, count), rand(count, 64))


def _scattered(method: str, count: int) -> Run:
    """A write along the first dimension, of elements by an index each."""
    return forward(getattr(rand(2000, 64), method), 0, integers(2000, count, 16), rand(count, 16))


def _scatter_reduce(count: int) -> Run:
    source = rand(count, 16)
    return forward(rand(2000, 64).scatter_reduce_, 0, integers(2000, count, 16), source, reduce="amax")


def _ones(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


_OPS: dict[str, Callable[[int], Run]] = {
    "index": lambda n: both(lambda x, i: x[i], rand(2000, 64, grad=True), integers(2000, n)),
    "index by two": lambda n: both(
        lambda x, i, j: x[i, j], rand(200, 300, 8, grad=True), integers(200, n), integers(300, n)
    ),
    "index_put": _index_put,
    "index_put accumulate": partial(_index_put, accumulate=True),
    "index_add": partial(_along, "index_add_"),
    "index_copy": partial(_along, "index_copy_"),
    "index_select": lambda n: both(torch.index_select, rand(2000, 64, grad=True), 0, integers(2000, n)),
    "gather": lambda n: both(torch.gather, rand(2000, 64, grad=True), 0, integers(2000, n, 16)),
    "scatter": partial(_scattered, "scatter_"),
    "scatter_add": partial(_scattered, "scatter_add_"),
    "scatter_reduce": _scatter_reduce,
    "masked_fill": lambda n: both(torch.masked_fill, rand(n, 16, grad=True), integers(2, n, 16) == 0, 0.0),
    "where": lambda n: both(
        torch.where, integers(2, n, 16) == 0, rand(n, 16, grad=True), rand(n, 16, grad=True)
    ),
    "masked_select": lambda n: forward(torch.masked_select, rand(n, 16), _ones(n, 16)),
    "nonzero": lambda n: forward(torch.nonzero, _ones(n, 4, dtype=torch.float32)),
    "boolean index": lambda n: forward(lambda x, m: x[m], rand(n, 8), _ones(n)),
    "take": lambda n: forward(torch.take, rand(2000, 64), integers(128_000, n)),
    "put": lambda n: forward(rand(2000, 64).put_, integers(128_000, n), rand(n), accumulate=True),
    "repeat_interleave": lambda n: forward(torch.repeat_interleave, rand(n, 4), 3, dim=0),
    "roll and flip": lambda n: forward(lambda x: (x.roll(3, 0), x.flip(1)), rand(n, 16)),
}
