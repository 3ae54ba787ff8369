"""``tensor.data = other``: a tensor takes another's memory, device and type, and stays the object that it was.

NOTE [Setting data]
torch does this below the dispatcher (torch/csrc/autograd/variable.cpp, ``VariableHooks::set_data``): it copies every
field of the tensor but those of autograd, so ``requires_grad``, ``.grad``, hooks and identity stay, and the gradient
accumulator goes if the device or the type changed. For virtual tensors two things are missing.

1. FakeTensor keeps its device beside the tensor, in ``fake_device``: it has to follow.
2. What makes a tensor virtual (the class, the dispatch key) is not copied. A real CPU tensor that is given virtual
   data becomes virtual first (`become_virtual`), a virtual one that is given real data takes a virtual tensor over
   it (`OpRunner.over`), which shares the values where they are followed and keeps pinned memory pinned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner

_DATA: Any = torch._C.TensorBase.data


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Replace the setter of ``torch.Tensor.data``. See NOTE [Setting data]."""

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


def is_virtual(mode: OpRunner, value: Any) -> bool:
    """Whether a tensor stands for memory of the virtual GPU or of its host, by itself or over one of torch's own."""
    return type(value) is FakeTensor or type(value) in mode.twins


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
    torch._C._swap_tensor_impl(tensor, other)
    if cls is nn.Parameter:
        tensor._is_param = True
    tensor.requires_grad_(requires_grad)
    tensor.grad = gradient
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after
