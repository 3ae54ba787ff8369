"""Results of products over groups of rows, as CUDA makes them.

torch's own description takes bfloat16 alone and, on a build without CUDA, leaves the padding of rows away.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vramfit.virtual.kernels.rules import round_up

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BYTES = 16


def grouped_mm(
    mode: FakeTensorMode,
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    offs: Tensor | None = None,
) -> FakeTensor:
    """``_grouped_mm(left, right, offs)``: rows of the result start at multiples of 16 bytes.

    ATen/native/GroupedMMUtils.h, ``_grouped_mm_validate_inputs`` and ``create_grouped_gemm_output_tensor``.

    Raises:
        RuntimeError: arguments that the kernel refuses.
    """
    offsets = offs if offsets is None else offsets
    if left.dtype not in _TYPES or right.dtype != left.dtype:
        raise RuntimeError(
            "Expected mat_a and mat_b to have the same type out of BFloat16, Half and Float, "
            f"got {left.dtype} and {right.dtype}"
        )
    if left.dim() not in (2, 3) or right.dim() not in (2, 3):
        raise RuntimeError("mat_a and mat_b have to be 2 or 3d")
    if (left.dim() == 2 or right.dim() == 2) != (offsets is not None):
        raise RuntimeError(
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        )
    if (left.dim() == 3 or right.dim() == 3) and left.shape[-1] != right.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if bias is not None:
        raise RuntimeError("Bias not supported yet")
    shape = _shape(left, right, offsets)
    dtype = out_dtype or left.dtype
    row = round_up(shape[-1], _ROW_BYTES // dtype.itemsize)
    strides = (shape[1] * row, row, 1) if len(shape) == 3 else (row, 1)
    return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), left.device)


def _shape(left: Tensor, right: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if left.dim() == 2:
        if right.dim() == 2:
            assert offsets is not None
            return (offsets.shape[0], left.shape[0], right.shape[1])
        return (left.shape[0], right.shape[-1])
    if right.dim() == 2:
        return (left.shape[1], right.shape[1])
    if left.shape[0] != right.shape[0]:
        raise RuntimeError("batched dimension has to match")
    return (left.shape[0], left.shape[1], right.shape[-1])
