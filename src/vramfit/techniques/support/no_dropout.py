"""Lets a model drop nothing, so that a batch and its pieces can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.torch_internals.layers import DropoutNd

_DROPPING = ("drop", "stochasticdepth")
"""In the names of layers that drop values or whole branches, and keep how many of them as ``p``."""

_FUNCTIONS = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.feature_alpha_dropout,
    }
)
_SHARE = 4
"""Place of ``dropout_p`` among the arguments of scaled dot-product attention."""


def silence_dropout(model: nn.Module) -> bool:
    """Let a model drop nothing; whether it did before.

    Beside the layers of torch these are all numbers that modules hold under a name with ``drop`` in it: the dropout of
    recurrent layers, of attention, of functions, of whole branches.
    """
    found = False
    for module in model.modules():
        names = [name for name, value in vars(module).items() if "drop" in name and type(value) is float]
        kind = type(module).__name__.lower()
        dropping = any(part in kind for part in _DROPPING) and type(getattr(module, "p", None)) is float
        if dropping or isinstance(module, DropoutNd):
            names.append("p")
        for name in names:
            found = found or getattr(module, name) > 0
            setattr(module, name, 0.0)
    return found


class NothingDropped(TorchFunctionMode):
    """Dropout by functions gives back what it got, whatever probability a model's code writes there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One function of torch."""
        kwargs = dict(kwargs or {})
        if func in _FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = tuple(0.0 if place == _SHARE else value for place, value in enumerate(args))
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """While this is entered, neither layers nor functions drop anything."""
    before = [
        (module, {name: value for name, value in vars(module).items() if type(value) is float})
        for module in model.modules()
    ]
    silence_dropout(model)
    try:
        with NothingDropped():
            yield
    finally:
        for module, values in before:
            vars(module).update(values)
