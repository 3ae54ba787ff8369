"""Tensors that stay the same objects while their memory or their class changes: ``.data = other``, ``as_subclass``.

NOTE [Setting data]
torch does this below the dispatcher (torch/csrc/autograd/variable.cpp, ``VariableHooks::set_data``): it copies every
field of the tensor but those of autograd, so ``requires_grad``, ``.grad``, hooks and identity stay, and the gradient
accumulator goes if the device or the type changed. For virtual tensors two things are missing.

1. FakeTensor keeps its device beside the tensor, in ``fake_device``: it has to follow.
2. What makes a tensor virtual (the class, the dispatch key) is not copied. A real CPU tensor that is given virtual
   data becomes virtual first (`become_virtual`), a virtual one that is given real data takes a virtual tensor over
   it (`OpRunner.over`), which shares the values where they are followed and keeps pinned memory pinned.

Classes: see NOTE [Tensor classes] in vramfit/virtual/tensor_subclasses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from vramfit.patching import PatchStack
from vramfit.torch_internals.autograd_engine import TensorBase
from vramfit.torch_internals.dispatch import DisableTorchFunctionSubclass
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.tensor_objects import (
    original_make_subclass,
    set_version_counter,
    subclass_maker,
    swap_tensor_impl,
)
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner

_DATA: Any = TensorBase.data
_PLAIN = (torch.Tensor, FakeTensor, nn.Parameter)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Replace the setter of ``torch.Tensor.data`` and what puts classes on tensors."""
    _patch_data(mode, patches)
    _patch_as_subclass(mode, patches)
    _patch_make(mode, patches)


def is_virtual(mode: OpRunner, value: Any) -> bool:
    """Whether a tensor stands for memory of the virtual GPU or of its host, by itself or over one of torch's own."""
    return type(value) is FakeTensor or type(value) in mode.twins


def _patch_data(mode: OpRunner, patches: PatchStack) -> None:
    """Replace the setter. See NOTE [Setting data]."""

    def set_data(self: torch.Tensor, value: Any) -> None:
        mine, its = is_virtual(mode, self), is_virtual(mode, value)
        if not (mine or its):
            _DATA.__set__(self, value)
            return
        if not mine:
            if type(value) is not FakeTensor or not _is_dense_host(self):
                _DATA.__set__(self, value)  # torch refuses it, or the class of the tensor handles it
                return
            become_virtual(mode, self)
        elif not its and _is_dense_host(value):
            value = mode.over(value)
        parameter = isinstance(self, nn.Parameter)
        with mode.twins.as_fake((self, value)):
            _set(mode, self, value, parameter=parameter)

    patches.set(torch.Tensor, "data", property(_DATA.__get__, set_data, _DATA.__delete__))


def _is_dense_host(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
    )


def _set(mode: OpRunner, target: torch.Tensor, source: torch.Tensor, *, parameter: bool) -> None:
    record = mode.meter.record_of(target)
    module = None if record is None else record.module
    _DATA.__set__(target, source)
    target.fake_device = source.fake_device  # type: ignore[attr-defined]
    if parameter:
        mode.meter.tag(target, Category.PARAMETERS, module)


def become_virtual(mode: OpRunner, tensor: torch.Tensor) -> None:
    """Make a real CPU tensor a virtual one on the host, in place.

    The object, ``requires_grad``, ``.grad`` and hooks stay. A graph of real CPU tensors that was recorded from it
    before ends in the memory that it had.

    Raises:
        NotImplementedError: it was computed with gradients, so it is part of a graph of real tensors.
    """
    if tensor.grad_fn is not None:
        raise NotImplementedError(
            "vramfit: .data of a CPU tensor that was computed with gradients cannot be set to a tensor of the virtual "
            "GPU; set that of its detached copy"
        )
    other = mode.over(tensor.detach())
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    gradient, requires_grad, cls = tensor.grad, tensor.requires_grad, type(tensor)
    version = None if tensor.is_inference() else tensor._version  # inference tensors count none
    notes, virtual = dict(vars(tensor)), dict(vars(other))
    tensor.__class__ = FakeTensor
    other.__class__ = cls  # type: ignore[assignment]
    tensor.__dict__.clear()
    tensor.__dict__.update(notes, **virtual)
    other.__dict__.clear()
    swap_tensor_impl(tensor, other)
    if cls is nn.Parameter:
        tensor._is_param = True
    tensor.requires_grad_(requires_grad)
    tensor.grad = gradient
    if version is not None:
        set_version_counter((tensor,), (version,))
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after


# -- Classes ---------------------------------------------------------------------------------------------------


def _patch_as_subclass(mode: OpRunner, patches: PatchStack) -> None:
    """Give virtual tensors the classes that a program puts on its tensors."""
    twins = mode.twins
    original: Callable[..., torch.Tensor] = torch.Tensor.as_subclass

    def as_subclass(self: torch.Tensor, cls: type) -> Any:
        if type(self) is not FakeTensor and type(self) not in twins:
            return original(self, twins.origin(cls))  # copied to the host
        with DisableTorchFunctionSubclass():
            out = torch.ops.aten.alias.default(self)  # differentiable, as the original
        if cls not in _PLAIN:
            twins.put_on(out, cls)
        return out

    patches.set(torch.Tensor, "as_subclass", as_subclass)


def _patch_make(mode: OpRunner, patches: PatchStack) -> None:
    """``torch.Tensor._make_subclass(cls, data)``, with which classes of parameters make themselves.

    Like ``nn.Parameter``, a parameter of a class of the program's is virtual from birth.
    """
    original: Callable[..., torch.Tensor] = original_make_subclass
    twins = mode.twins

    def make(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> torch.Tensor:
        cls = twins.origin(cls)  # the class may come from a virtual tensor
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

    subclass_maker.replace(patches, staticmethod(make))


def _is_annotated(cls: Any) -> bool:
    """Whether a class is a program's own on plain tensors; those without a shape are made again when they have one."""
    if issubclass(cls, (FakeTensor, UninitializedBuffer, UninitializedParameter)) or cls in _PLAIN:
        return False
    return bool(cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
