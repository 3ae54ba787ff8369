"""torchao's NF4 tensors on the virtual card: their bytes, and the weight that a product restores.

Expected figures follow torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py:
``NF4Tensor.from_tensor``, ``get_original_weight``, ``LinearNF4``.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.usefixtures("kept_workspaces")

quantization = pytest.importorskip("torchao.quantization")
if not hasattr(quantization, "NF4Tensor"):
    pytest.skip("this torchao keeps NF4Tensor elsewhere", allow_module_level=True)

ROWS, COLUMNS, TOKENS = 1024, 2048, 512
N, HALF, SCALES = ROWS * COLUMNS, ROWS * COLUMNS // 2, ROWS * COLUMNS // 64


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def requests(gpu: VirtualGPU, start: int) -> list[int]:
    trace = gpu.trace
    return [int(trace.size[row]) for row in range(start, len(trace)) if trace.kind[row] == EventKind.ALLOC]


def quantised() -> Any:
    weight = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    return nn.Parameter(quantization.NF4Tensor.from_tensor(weight, 64, 256), requires_grad=False)


def test_a_weight_keeps_its_packed_bytes(gpu: VirtualGPU) -> None:
    nothing = allocated()
    weight = quantised()
    # packed; a scale of a byte for 64; a factor for 256 scales, their mean and a table of 16, of a block each
    assert allocated() - nothing == HALF + SCALES + 3 * 512
    assert weight.device == torch.device("cuda", 0) and weight.shape == (ROWS, COLUMNS)
    trace = gpu.trace
    packed = [
        row for row in range(len(trace)) if trace.kind[row] == EventKind.ALLOC and trace.size[row] == HALF
    ][-1]
    assert Category(int(trace.category[packed])) is Category.PARAMETERS


def test_a_product_restores_the_weight_both_ways(gpu: VirtualGPU) -> None:
    weight = quantised()
    x = torch.zeros(TOKENS, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    # numbers of the table for the first and the second of each byte, as int64; what they stand for; the scales and
    # their sum with the mean; each of the halves with the scales beside it; both together
    restored = [
        HALF,
        8 * HALF,
        HALF,
        8 * HALF,
        2 * HALF,
        2 * HALF,
        2 * SCALES,
        2 * SCALES,
        *4 * [2 * HALF],
        2 * N,
    ]
    start = len(gpu.trace)
    y = F.linear(x, weight)
    forward = requests(gpu, start)
    workspace = 8_519_680
    assert forward[: len(restored)] == restored
    assert sorted(forward[len(restored) :]) == sorted([2 * TOKENS * ROWS, workspace])
    before, gradient = allocated(), torch.zeros_like(y)
    torch.cuda.reset_peak_memory_stats()
    start = len(gpu.trace)
    y.backward(gradient)
    backward = requests(gpu, start)
    assert backward[: len(restored)] == restored, "only the packed weight was kept"
    assert 2 * TOKENS * COLUMNS in backward[len(restored) :]
    # When both halves are put together: their numbers as int64, their values, the scales, their products, the weight.
    peak = torch.cuda.max_memory_allocated() - before - 2 * TOKENS * ROWS
    assert peak == 2 * 8 * HALF + 2 * 2 * HALF + 2 * SCALES + 2 * 2 * HALF + 2 * N
