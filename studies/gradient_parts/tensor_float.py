"""TF32 on a CPU: the inputs of float32 products rounded to 10 bits of mantissa, as tensor cores round them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.techniques.tf32 import Tf32Setting

_DROPPED = 13
"""Bits of float32's mantissa that TF32 does not have: 23 less 10."""

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm"}
_CONVOLUTIONS = {"convolution", "convolution_backward"}


@contextmanager
def rounding(setting: Tf32Setting) -> Iterator[None]:
    """Round what the switches of the technique would let a card round. Attention runs in its products."""
    names = (_PRODUCTS if setting.matmul else set()) | (_CONVOLUTIONS if setting.convolution else set())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), _Rounding(names):
        yield


class _Rounding(TorchDispatchMode):
    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.overloadpacket.__name__ in self._names:
            args = torch.utils._pytree.tree_map_only(torch.Tensor, rounded, args)
        return func(*args, **(kwargs or {}))


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor whose values are those of TF32, the nearest, ties away from zero; any other as it is.

    PTX ISA, ``cvt.rna.tf32.f32``: what kernels convert with.
    """
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    half, mask = 1 << (_DROPPED - 1), -(1 << _DROPPED)
    found = ((bits + half) & mask).view(torch.float32).view(tensor.shape)
    return torch.where(tensor.isfinite(), found, tensor)
