"""Products over groups of rows."""

from __future__ import annotations

import pytest
import torch

from vramfit.virtual.gpu import VirtualGPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_the_result_are_padded_to_16_bytes(gpu: VirtualGPU, dtype: torch.dtype) -> None:
    rows = torch.randn(20, 32, device="cuda", dtype=dtype)
    weights = torch.randn(4, 32, 40, device="cuda", dtype=dtype)[:, :, :36]
    ends = torch.tensor([5, 10, 15, 20], dtype=torch.int32, device="cuda")
    out = torch._grouped_mm(rows, weights, offs=ends)
    step = 16 // dtype.itemsize
    assert out.shape == (20, 36) and out.dtype is dtype
    assert out.stride() == (-(-36 // step) * step, 1)


def test_groups_have_gradients(gpu: VirtualGPU) -> None:
    rows = torch.randn(20, 32, device="cuda", requires_grad=True)
    weights = torch.randn(4, 32, 40, device="cuda", requires_grad=True)
    ends = torch.tensor([5, 10, 15, 20], dtype=torch.int32, device="cuda")
    torch._grouped_mm(rows, weights, offs=ends).sum().backward()
    assert rows.grad is not None and rows.grad.shape == rows.shape
    assert weights.grad is not None and weights.grad.shape == weights.shape


def test_what_the_kernel_refuses_is_refused(gpu: VirtualGPU) -> None:
    rows, weights = torch.randn(20, 32, device="cuda"), torch.randn(4, 32, 40, device="cuda")
    with pytest.raises(RuntimeError, match="offsets"):
        torch._grouped_mm(rows, weights)
    with pytest.raises(RuntimeError, match="same type"):
        torch._grouped_mm(rows, weights.half(), offs=torch.zeros(4, dtype=torch.int32, device="cuda"))
