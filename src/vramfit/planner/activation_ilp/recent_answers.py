"""Remembers what was worked out for the step profiles that were asked about last."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar, cast

_T = TypeVar("_T")
_P = ParamSpec("_P")

KEPT = 64
"""Answers of one function that are remembered."""


def remembered(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of a step profile, by its identity, and of what else can be hashed, which is asked often.

    A step profile holds thousands of operations: to hash it takes longer than most of what is asked about it. It is
    held as long as its answers are, so that no other has its identity.
    """
    known: OrderedDict[Hashable, tuple[object, _T]] = OrderedDict()

    @functools.wraps(function)
    def asked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        step, *others = cast("tuple[Any, ...]", args)
        key = (id(step), *others, *kwargs.items())
        if key not in known:
            known[key] = step, function(*args, **kwargs)
            while len(known) > KEPT:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    return asked
