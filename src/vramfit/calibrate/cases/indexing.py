"""Reading and writing by index: gather, scatter, index_put, index_add, masks; deterministic as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


def _index(count: int) -> Run:
    return both(lambda x, i: x[i], rand(2000, 64, grad=True), integers(2000, count))


def _index_two(count: int) -> Run:
    return both(
        lambda x, i, j: x[i, j], rand(200, 300, 8, grad=True), integers(200, count), integers(300, count)
    )


def _index_put(count: int, accumulate: bool = False) -> Run:
    target, index, values = rand(2000, 64), integers(2000, count), rand(count, 64)
    return forward(target.index_put_, (index,), values, accumulate=accumulate)


def _index_add(count: int) -> Run:
    return forward(rand(2000, 64).index_add_, 0, integers(2000, count), rand(count, 64))


def _index_copy(count: int) -> Run:
    return forward(rand(2000, 64).index_copy_, 0, integers(2000, count), rand(count, 64))


def _index_select(count: int) -> Run:
    return both(torch.index_select, rand(2000, 64, grad=True), 0, integers(2000, count))


def _gather(count: int) -> Run:
    return both(torch.gather, rand(2000, 64, grad=True), 0, integers(2000, count, 16))


def _scatter(count: int) -> Run:
    return forward(rand(2000, 64).scatter_, 0, integers(2000, count, 16), rand(count, 16))


def _scatter_add(count: int) -> Run:
    return forward(rand(2000, 64).scatter_add_, 0, integers(2000, count, 16), rand(count, 16))


def _scatter_reduce(count: int) -> Run:
    source = rand(count, 16)
    return forward(rand(2000, 64).scatter_reduce_, 0, integers(2000, count, 16), source, reduce="amax")


def _masked_fill(count: int) -> Run:
    return both(torch.masked_fill, rand(count, 16, grad=True), integers(2, count, 16) == 0, 0.0)


def _where(count: int) -> Run:
    return both(
        torch.where, integers(2, count, 16) == 0, rand(count, 16, grad=True), rand(count, 16, grad=True)
    )


def _masked_select(count: int) -> Run:
    return forward(
        torch.masked_select, rand(count, 16), torch.ones(count, 16, dtype=torch.bool, device="cuda")
    )


def _nonzero(count: int) -> Run:
    return forward(torch.nonzero, torch.ones(count, 4, device="cuda"))


def _bool_index(count: int) -> Run:
    return forward(lambda x, m: x[m], rand(count, 8), torch.ones(count, dtype=torch.bool, device="cuda"))


def _take(count: int) -> Run:
    return forward(torch.take, rand(2000, 64), integers(128_000, count))


def _put(count: int) -> Run:
    return forward(rand(2000, 64).put_, integers(128_000, count), rand(count), accumulate=True)


def _repeat_interleave(count: int) -> Run:
    return forward(torch.repeat_interleave, rand(count, 4), 3, dim=0)


def _roll_flip(count: int) -> Run:
    return forward(lambda x: (x.roll(3, 0), x.flip(1)), rand(count, 16))


_OPS: dict[str, Callable[..., Any]] = {
    "index": _index,
    "index by two": _index_two,
    "index_put": _index_put,
    "index_put accumulate": partial(_index_put, accumulate=True),
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "masked_fill": _masked_fill,
    "where": _where,
    "masked_select": _masked_select,
    "nonzero": _nonzero,
    "boolean index": _bool_index,
    "take": _take,
    "put": _put,
    "repeat_interleave": _repeat_interleave,
    "roll and flip": _roll_flip,
}
