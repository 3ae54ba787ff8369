"""Products of float8 matrices with scales."""

from __future__ import annotations

import torch

from vramfit import VirtualGPU


def test_a_scaled_product_may_be_written_into_a_tensor() -> None:
    """What Inductor writes for it: ``extern_kernels._scaled_mm(..., out=buf)``."""
    with VirtualGPU("H100 SXM"):
        left = torch.empty(256, 128, dtype=torch.float8_e4m3fn, device="cuda")
        right = torch.empty(512, 128, dtype=torch.float8_e4m3fn, device="cuda").t()
        scale = torch.ones((), device="cuda")
        fresh = torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)
        out = torch.empty_like(fresh)
        before = torch.cuda.memory_allocated()
        assert torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, out=out) is out
        assert torch.cuda.memory_allocated() == before
