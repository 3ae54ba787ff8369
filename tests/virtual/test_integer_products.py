"""Products of integers with few rows, which a card refuses, and what torchao then does instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vramfit

pytestmark = pytest.mark.usefixtures("kept_workspaces")

quantization = pytest.importorskip("torchao.quantization")

ROWS, COLUMNS = 1024, 512


def test_a_card_refuses_up_to_sixteen_rows() -> None:
    """aten/src/ATen/native/cuda/Blas.cpp, ``_int_mm_out_cuda``."""
    with vramfit.VirtualGPU("RTX 4090"):
        weight = torch.empty(COLUMNS, ROWS, dtype=torch.int8, device="cuda")
        with pytest.raises(RuntimeError, match=r"self.size\(0\) needs to be greater than 16, but got 16"):
            torch._int_mm(torch.empty(16, COLUMNS, dtype=torch.int8, device="cuda"), weight)
        assert torch._int_mm(torch.empty(17, COLUMNS, dtype=torch.int8, device="cuda"), weight).shape == (
            17,
            ROWS,
        )
        with pytest.raises(RuntimeError, match="multiple of 8, but got 12"):
            torch._int_mm(torch.empty(32, 12, dtype=torch.int8, device="cuda"), weight[:12])


@pytest.mark.parametrize(("rows", "bytes_of_each"), [(16, 5), (17, 1)])
def test_torchao_widens_weights_to_float32_for_few_rows(rows: int, bytes_of_each: int) -> None:
    """torchao/kernel/intmm.py, ``safe_int_mm``: the weight is copied, and where that fails multiplied in float32."""
    with vramfit.VirtualGPU("RTX 4090"), torch.no_grad():
        model = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16, device="cuda")
        quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
        inputs = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device="cuda")
        torch.matmul(inputs, inputs.T)  # so that cuBLAS has its workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(inputs)
        taken = torch.cuda.max_memory_allocated() - before
    weight = bytes_of_each * ROWS * COLUMNS
    assert weight <= taken <= weight + 16 * rows * (ROWS + COLUMNS)
