"""Indices that max-pooling saves, in shorter integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vramfit.techniques.support.saved import Kept, Packed, in_backward, packing

POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


class Narrow:
    """What the graph holds of indices that fit a shorter type."""

    __slots__ = ("_indices",)

    def __init__(self, indices: torch.Tensor, limit: int) -> None:
        self._indices = indices.to(torch.int16 if limit <= 1 << 15 else torch.int32)

    def unpack(self) -> torch.Tensor:
        """The indices, as they were."""
        return self._indices.to(torch.int64)


class ShortIndices:
    """Surrounds a max-pooling: its indices count the places of one channel (aten/src/ATen/native/Pool.h)."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass under hooks."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        pooled: torch.Tensor = args[0] if args else kwargs["input"]
        places = pooled.shape[-_dimensions(module) :].numel()
        if places > 1 << 31:
            return forward(*args, **kwargs)
        with packing(partial(self._take, places, in_backward())):
            return forward(*args, **kwargs)

    @staticmethod
    def _take(places: int, recomputing: bool, tensor: torch.Tensor) -> Packed | None:
        if tensor.dtype is not torch.int64:
            return None
        return Kept(tensor) if recomputing else Narrow(tensor, places)


def _dimensions(pool: nn.Module) -> int:
    for kind, dimensions in zip(POOLS, (1, 2, 3) * 2, strict=True):
        if isinstance(pool, kind):
            return dimensions
    raise TypeError(f"{type(pool).__name__} is no max-pooling")
