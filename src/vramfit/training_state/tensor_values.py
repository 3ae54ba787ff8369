"""Values of tensors: compared, counted and copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Copying = Callable[[torch.Tensor], torch.Tensor]
"""Gives a copy of a tensor's values; where it lies is up to who asks for it."""


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes to a tensor; -1 where none is kept, as in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def buffer_writes(model: nn.Module, without: type[Any]) -> dict[str, tuple[int, int]]:
    """Which buffer each name of a model has, as its ``id``, and autograd's count of writes to it.

    Args:
        without: kind of modules whose buffers are left out.
    """
    return {
        f"{path}.{name}" if path else name: (id(buffer), buffer._version)
        for path, module in model.named_modules()
        if not isinstance(module, without)
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    }


def where_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values on its own device."""
    return tensor.detach().clone()


def on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values on the host."""
    return tensor.detach().to("cpu", copy=True)


def solid(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without dimensions along which all its values are one in memory, as ``expand`` makes them."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal values; NaN equals NaN. Of those without values, whether they are one."""
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
        return one is other
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    nan = one.isnan()
    return (
        bool(nan.any())
        and bool(torch.equal(nan, other.isnan()))
        and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    )
