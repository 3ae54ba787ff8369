"""``tensor.as_subclass(cls)`` on virtual tensors. See NOTE [Tensor classes] in vramfit/virtual/subclasses.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.programs.patching import PatchStack

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode

_PLAIN = (torch.Tensor, FakeTensor, nn.Parameter)


def install(mode: VirtualMode, patches: PatchStack) -> None:
    """Give virtual tensors the classes that a program puts on its tensors."""
    twins = mode.twins
    original: Callable[..., torch.Tensor] = torch.Tensor.as_subclass

    def as_subclass(self: torch.Tensor, cls: type) -> Any:
        if type(self) is not FakeTensor and type(self) not in twins:
            return original(self, twins.origin(cls))  # copied to the host
        with torch._C.DisableTorchFunctionSubclass():
            out = torch.ops.aten.alias.default(self)  # differentiable, as the original
        if cls not in _PLAIN:
            twins.put_on(out, cls)
        return out

    patches.set(torch.Tensor, "as_subclass", as_subclass)
