"""The grid of cases, one module a family. Shapes lie on both sides of the thresholds that the kernels have."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain, zip_longest

from vramfit.calibrate.cases import (
    attention,
    convolution,
    embedding,
    fft,
    host,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    optimizer,
    random,
    reduction,
    resampling,
    rnn,
    sorting,
)
from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run

__all__ = ["Case", "Flag", "Grid", "OpFamily", "Run", "find_case", "grid"]

_MODULES = (
    convolution,
    attention,
    matmul,
    rnn,
    norm,
    optimizer,
    loss,
    embedding,
    sorting,
    reduction,
    indexing,
    random,
    resampling,
    fft,
    linalg,
    host,
)


@cache
def _every() -> tuple[Case, ...]:
    """All cases in the order of measurement: by priority, the families taking turns."""
    found: list[Case] = []
    families = [module.cases() for module in _MODULES]
    for priority in (0, 1, 2):
        rows = [[case for case in cases if case.priority == priority] for cases in families]
        found += [case for case in chain.from_iterable(zip_longest(*rows)) if case is not None]
    return tuple(found)


def grid(families: Iterable[OpFamily] = ()) -> tuple[Case, ...]:
    """The cases of some families, of all if none is named, in the order of measurement."""
    wanted = frozenset(families) or frozenset(OpFamily)
    return tuple(case for case in _every() if case.family in wanted)


@cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for case in _every()}


def find_case(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: there is none.
    """
    return _by_name()[name]
