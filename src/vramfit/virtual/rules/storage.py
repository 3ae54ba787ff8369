"""Ops that change a storage under a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vramfit.virtual.rules.registry import rule

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode


@rule("aten.resize_.default", "aten.resize_as_.default", "aten.set_.default", "aten.resize.default")
def resize_(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A resized tensor may need a larger storage: the old shadow is gone, the block follows."""
    tensor: torch.Tensor = args[0]
    mode.shadows.forget(tensor)
    out = mode.describe(func, args, kwargs)
    if tensor.device.type == "cuda":
        mode.meter.adopt(tensor, mode.ops[func].name)
    return out
