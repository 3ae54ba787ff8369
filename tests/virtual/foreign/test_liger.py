"""Liger-Kernel, whose kernels are all Triton: what its wrappers allocate, read from their source (version 0.8.5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

SMALLEST = 512  # bytes; the allocator's unit
MULTIPROCESSORS = 128  # of an RTX 4090
BLAS_WORKSPACE = 8_519_680


def allocated(gpu: VirtualGPU, call: Callable[[], object]) -> list[int]:
    """Bytes of each block above the smallest that a call takes, in order, without cuBLAS's workspaces."""
    before = len(gpu.trace.kind)
    kept = call()
    trace = gpu.trace
    sizes = trace.size[before:][trace.kind[before:] == EventKind.ALLOC]
    del kept
    return [int(size) for size in sizes if size > SMALLEST and size != BLAS_WORKSPACE]


def test_rms_norm_keeps_one_figure_a_row_and_sums_a_row_of_gradients_per_multiprocessor(
    gpu: VirtualGPU,
) -> None:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    rows, columns = 1024, 2048
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out: list[torch.Tensor] = []
    forward = allocated(
        gpu, lambda: out.append(LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True, None))
    )
    # rms_norm_forward: Y like X, RSTD in float32
    assert forward == [rows * columns * 2, rows * 4]
    gradient = torch.ones_like(out[0])
    backward = allocated(gpu, lambda: out[0].backward(gradient))
    # rms_norm_backward in place: _dW of (multiprocessors, columns) in float32, its sum, and that in bfloat16
    assert backward[:3] == [MULTIPROCESSORS * columns * 4, columns * 4, columns * 2]


def test_fused_linear_cross_entropy_holds_the_logits_of_one_chunk(gpu: VirtualGPU) -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    tokens, hidden, vocabulary = 2048, 256, 16_384
    x = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    with torch.no_grad():
        sizes = allocated(
            gpu, lambda: fused_linear_cross_entropy_forward(x, weight, target, chunk_mem_const=1)
        )
    # inc_factor = vocabulary / hidden = 64; chunk_size = tokens / 64 = 32
    logits = 32 * vocabulary * 2
    assert sizes[:3] == [
        tokens * hidden * 2,
        vocabulary * hidden * 2,
        tokens * 4,
    ]  # grad_input, grad_weight, loss_1d
    # beside the mask, a byte each, and its int64 copy that sum() makes on a card: one chunk of logits, reused
    assert sizes[3:] == [tokens, tokens * 8, logits]
    full = tokens * vocabulary * 2
    assert torch.cuda.max_memory_allocated() < full
