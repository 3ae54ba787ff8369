"""Ops that change a storage under a tensor."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_RESIZE_ = torch.ops.aten.resize_.default


_SOURCES = (
    "source_Tensor",
    "source_Tensor_storage_offset",
    "source_Storage",
    "source_Storage_storage_offset",
)


@rule("aten.resize_.default", "aten.resize_as_.default", "aten.set_.default", "aten.resize.default")
def resize_(mode: OpRunner, call: OpCall) -> Any:
    """A resized tensor may need a larger storage: the old shadow is gone, the block follows."""
    tensor: torch.Tensor = call.args[0]
    if call.func is _RESIZE_ and not call.kwargs and tuple(call.args[1]) == tuple(tensor.shape):
        return tensor
    mode.shadows.forget(tensor)
    out = mode.describe(call)
    if tensor.device.type == "cuda":
        mode.meter.adopt(tensor, call.info.name)
    return out


@rule(*(f"aten.set_.{source}" for source in _SOURCES))
def set_(mode: OpRunner, call: OpCall) -> Any:
    """``tensor.set_(source)``: it takes memory that is there already, on its own device."""
    target, source, *rest = call.args
    where = _device_of(target, source)
    if where != target.device:
        # aten/src/ATen/native/Resize.h: checkSetStorage
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{target.device}" to a storage on different '
            f'device "{where}".  This is no longer allowed; the devices must match.'
        )
    if type(target) is not FakeTensor:
        raise NotImplementedError(
            "vramfit: set_() of a real CPU tensor cannot take memory of a virtual one; assign to its .data"
        )
    return mode.run(call.with_arguments(target, _virtual(mode, source), *rest), real=False)


def _device_of(target: torch.Tensor, source: torch.Tensor | torch.UntypedStorage) -> torch.device:
    if isinstance(source, torch.Tensor):
        return source.device
    # The storage of a virtual tensor on the host lies on meta for torch.
    return target.device if source.device.type == "meta" and target.device.type == "cpu" else source.device


def _virtual(mode: OpRunner, source: torch.Tensor | torch.UntypedStorage) -> Any:
    """A source on the host as its virtual stand-in."""
    if isinstance(source, torch.Tensor):
        return source if type(source) is FakeTensor else mode.over(source)
    if source.device.type == "cpu":
        return mode.over(torch.empty(0, dtype=torch.uint8, device="cpu").set_(source)).untyped_storage()
    return source
