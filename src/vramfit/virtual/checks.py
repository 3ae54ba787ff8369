"""Mistakes that a card refuses, but torch's descriptions by shape let pass.

The commonest is a half-precision layer fed with float32 (or the reverse): the meta functions promote, cuBLAS does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.torch_cuda import virtual_generator

_aten = torch.ops.aten
_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}

Check = Callable[[tuple[Any, ...]], None]


def check_arguments(call: OpCall) -> None:
    """Raise what the card would raise for arguments that do not go together.

    Raises:
        RuntimeError: in the card's own words.
    """
    check = _CHECKS.get(call.func)
    if check is not None:
        check(call.args)
    generator = call.kwargs.get("generator")
    if generator is not None and virtual_generator(generator) is None and _on_card(call):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def _on_card(call: OpCall) -> bool:
    device = call.kwargs.get("device")
    if device is None and call.args and isinstance(call.args[0], torch.Tensor):
        device = call.args[0].device
    return device is not None and device.type == "cuda"


def _product(first: int, second: int) -> Check:
    def check(args: tuple[Any, ...]) -> None:
        """aten/src/ATen/native/LinearAlgebra.cpp: ADDMM_META, and cuda/Blas.cpp."""
        one, two = args[first], args[second]
        if one.dtype != two.dtype:
            raise RuntimeError(
                f"mat1 and mat2 must have the same dtype, but got {_name(one)} and {_name(two)}"
            )
        if one.dim() == 2 and two.dim() == 2 and one.shape[1] != two.shape[0]:
            shapes = f"{one.shape[0]}x{one.shape[1]} and {two.shape[0]}x{two.shape[1]}"
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
        bias = args[0] if first else one
        if bias.dtype != one.dtype:
            raise RuntimeError(
                f"self and mat2 must have the same dtype, but got {_name(bias)} and {_name(two)}"
            )

    return check


def _layer_norm(args: tuple[Any, ...]) -> None:
    """aten/src/ATen/native/cuda/layer_norm_kernel.cu reads weight and bias as the input's type."""
    source = args[0]
    for parameter in args[2:4]:
        if parameter is not None and parameter.dtype != source.dtype:
            raise RuntimeError(f"expected scalar type {_name(source)} but found {_name(parameter)}")


def _nll_loss(args: tuple[Any, ...]) -> None:
    """aten/src/ATen/native/cuda/Loss.cu: class indices are int64 (uint8 passes)."""
    target = args[1]
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected scalar type Long but found {_name(target)}")


def _int_mm(args: tuple[Any, ...]) -> None:
    """aten/src/ATen/native/cuda/Blas.cpp, ``_int_mm_out_cuda``. torchao takes this error for an answer: with up to
    16 rows it then widens both operands to float32 (torchao/kernel/intmm.py, ``safe_int_mm``)."""
    one, two = args[0], args[1]
    if one.device.type != "cuda":
        return
    if one.shape[0] <= _INT_ROWS:
        raise RuntimeError(f"self.size(0) needs to be greater than {_INT_ROWS}, but got {one.shape[0]}")
    if not one.shape[1] or one.shape[1] % 8:
        raise RuntimeError(
            f"self.size(1) needs to be greater than 0 and a multiple of 8, but got {one.shape[1]}"
        )
    if not two.shape[1] or two.shape[1] % 8:
        raise RuntimeError(
            f"mat2.size(1) needs to be greater than 0 and a multiple of 8, but got {two.shape[1]}"
        )


_INT_ROWS = 16


def _name(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


_CHECKS: dict[OpOverload, Check] = {
    _aten.mm.default: _product(0, 1),
    _aten.addmm.default: _product(1, 2),
    _aten.native_layer_norm.default: _layer_norm,
    _aten._int_mm.default: _int_mm,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss2d_forward.default: _nll_loss,
}
