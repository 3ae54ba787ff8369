"""``aten::linear`` adds its bias in place, as it does for plain tensors.

aten/src/ATen/native/Linear.cpp: input that is not contiguous goes through ``matmul``, to whose result the bias is added
in place; tensor subclasses are given ``add`` instead, which makes a second result. Contiguous input with a bias of one
dimension is one ``addmm``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from vramfit.torch_internals.dispatch import DispatchKey, OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor

LINEAR: OpOverload = torch.ops.aten.linear.default


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` with the requests of plain tensors; differentiable.

    Args:
        input: of shape (..., features read).
        weight: of shape (features made, features read).
        bias: of shape (features made,).
    """
    if bias is None or not adds_in_place(input, weight, bias):
        out: torch.Tensor = LINEAR._op_dk(DispatchKey.CompositeImplicitAutograd, input, weight, bias)
        return out
    return torch.matmul(input, weight.t()).add_(bias)


def linear_below_autograd(
    data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` where autograd is passed over, as in inference mode.

    ``matmul`` makes one product of all rows where the weight wants a gradient (native/LinearAlgebra.cpp,
    ``should_fold``), and its transposed view still does there; a view that is made below autograd does not.
    """
    if not weight.requires_grad or weight.dim() != 2 or data.dim() < 3 or data.is_contiguous():
        return linear(data, weight, bias)
    rows = data.reshape(-1, data.shape[-1])
    out = torch.mm(rows, weight.t()).view(*data.shape[:-1], weight.shape[0])
    return out if bias is None else out.add_(bias)


def adds_in_place(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether a card adds the bias in place: no ``addmm``, and nothing there that is a subclass by itself."""
    if data.dim() == 2 or data.is_contiguous():
        return False
    plain: tuple[Any, ...] = (data, weight, bias)
    return all(isinstance(tensor, FakeTensor) for tensor in plain) and unpack_dual(bias).tangent is None
