"""What Dynamo meets of ours in a program, and compiles as part of it: all else of this package it is kept from.

A program may hold a function that stands in for one of torch's before anything is compiled: every module that was
given to ``torch.compile`` holds its bound ``__call__``. To a compiler the functions made here are the original.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch


def watched(
    original: Callable[..., Any], enter: Callable[[Any], Any], leave: Callable[[], Any]
) -> Callable[..., Any]:
    """A method that does as the original, with something done before and after each call that is not being compiled.

    Args:
        enter: called with the object.
        leave: called at the end, also where the original raises.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            leave()

    return call


_ORIGINALS: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


def original_of(function: Any) -> Callable[..., Any] | None:
    """What a function stands in for; None for one that is not of `standing_in`."""
    return _ORIGINALS.get(function) if isinstance(function, FunctionType) else None


def standing_in(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does as ours, and to a compiler as the original."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    _ORIGINALS[call] = original
    call.__name__, call.__qualname__, call.__module__ = ours.__name__, ours.__qualname__, ours.__module__
    call.__doc__ = ours.__doc__
    return call
