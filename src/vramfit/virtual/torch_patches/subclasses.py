"""Classes that a program puts on virtual tensors. See NOTE [Tensor classes] in vramfit/virtual/tensor_subclasses.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner

_PLAIN = (torch.Tensor, FakeTensor, nn.Parameter)


def install(mode: OpRunner, patches: PatchStack) -> None:
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
    _patch_make(mode, patches)


def _patch_make(mode: OpRunner, patches: PatchStack) -> None:
    """``torch.Tensor._make_subclass(cls, data)``, with which classes of parameters make themselves.

    Like ``nn.Parameter``, a parameter of a class of the program's is virtual from birth.
    """
    original: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
    twins = mode.twins

    def make(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> torch.Tensor:
        cls = twins.origin(cls)  # the class of a virtual tensor, asked for another
        if options or not _is_annotated(cls):
            return original(cls, data, require_grad, **options)
        parameter = issubclass(cls, nn.Parameter)
        if parameter and type(data) in (torch.Tensor, nn.Parameter) and data.device.type == "cpu":
            data = mode.wrap(data.detach())
        elif type(data) is FakeTensor or type(data) in twins:
            data = data.detach()
        else:
            return original(cls, data, require_grad)
        with twins.as_fake((data,)):
            if parameter:
                mode.meter.tag(data, Category.PARAMETERS)
        if type(data) in twins:  # a class of its own, of which the notes are left behind
            data = torch.ops.aten.alias.default(data)
        twins.put_on(data, cls)
        return data.requires_grad_() if require_grad else data

    patches.set(torch.Tensor, "_make_subclass", staticmethod(make))


def _is_annotated(cls: Any) -> bool:
    """Whether a class is a program's own on plain tensors; those without a shape are made again when they have one."""
    if issubclass(cls, (FakeTensor, UninitializedBuffer, UninitializedParameter)) or cls in _PLAIN:
        return False
    return bool(cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
