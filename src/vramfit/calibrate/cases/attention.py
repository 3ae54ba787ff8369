"""Scaled dot product attention: every backend, grouped queries, odd head sizes, masks."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, rand, short

_HALVES = (torch.float16, torch.bfloat16)
_FLASH, _EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_CUDNN, _MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
_NAMES = {_FLASH: "flash", _EFFICIENT: "efficient", _CUDNN: "cudnn", _MATH: "math", None: "chosen"}


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.ATTENTION)
    for backend in (None, _FLASH, _EFFICIENT, _CUDNN, _MATH):
        for dtype in _HALVES:
            for length, head in (
                (128, 64),
                (1000, 64),
                (2048, 128),
                (512, 80),
                (512, 40),
                (300, 72),
                (256, 256),
            ):
                if dtype is torch.float16 and (length, head) not in ((1000, 64), (512, 40)):
                    continue
                if backend is _CUDNN and head > 128:
                    continue
                shape = f"4x8x{length}x{head}"
                grid.add(
                    f"{_NAMES[backend]}/{shape}/causal/{short(dtype)}",
                    partial(_sdpa, backend, dtype, 8, length, length, head, causal=True),
                    priority=0 if (length, head) == (2048, 128) else 1,
                )
    for backend in (None, _FLASH, _CUDNN, _MATH):
        grid.add(
            f"{_NAMES[backend]}/2x32x1024x128/8 key heads/bf16",
            partial(_sdpa, backend, torch.bfloat16, 32, 1024, 1024, 128, key_heads=8, causal=True, batch=2),
            priority=0,
        )
    for backend in (None, _EFFICIENT, _MATH):
        grid.add(
            f"{_NAMES[backend]}/4x8x512x64/causal/fp32",
            partial(_sdpa, backend, torch.float32, 8, 512, 512, 64, causal=True),
        )
        for columns in (512, 509):
            grid.add(
                f"{_NAMES[backend]}/4x8x512x{columns}x64/mask/bf16",
                partial(_sdpa, backend, torch.bfloat16, 8, 512, columns, 64, masked=True),
            )
    for backend in (None, _FLASH, _EFFICIENT, _CUDNN):
        grid.add(
            f"{_NAMES[backend]}/4x8x512x64/dropout/bf16",
            partial(_sdpa, backend, torch.bfloat16, 8, 512, 512, 64, dropout=0.1),
        )
        grid.add(
            f"{_NAMES[backend]}/4x8x1x1024x64/decoding/bf16",
            partial(_sdpa, backend, torch.bfloat16, 8, 1, 1024, 64, trained=False),
        )
        grid.add(
            f"{_NAMES[backend]}/1x8x1x16384x128/decoding/bf16",
            partial(_sdpa, backend, torch.bfloat16, 8, 1, 16384, 128, trained=False, batch=1),
        )
    for dtype in (torch.float32, torch.bfloat16):
        grid.add(f"multihead module/8x128x256/{short(dtype)}", partial(_multihead, dtype))
    return grid.cases


def _sdpa(
    backend: SDPBackend | None,
    dtype: torch.dtype,
    heads: int,
    queries: int,
    keys: int,
    head: int,
    *,
    batch: int = 4,
    key_heads: int | None = None,
    causal: bool = False,
    masked: bool = False,
    dropout: float = 0.0,
    trained: bool = True,
) -> Run:
    q = rand(batch, heads, queries, head, dtype=dtype, grad=trained)
    k, v = (rand(batch, key_heads or heads, keys, head, dtype=dtype, grad=trained) for _ in range(2))
    mask = rand(batch, 1, queries, keys, dtype=dtype) if masked else None
    g = rand(batch, heads, queries, head, dtype=dtype)

    def run() -> object:
        if backend is None:
            return attend()
        with sdpa_kernel(backend):
            return attend()

    def attend() -> object:
        with torch.set_grad_enabled(trained):
            out = F.scaled_dot_product_attention(
                *(q, k, v, mask, dropout, causal), enable_gqa=key_heads is not None
            )
        return torch.autograd.grad(out, (q, k, v), g) if trained else out

    return run


def _multihead(dtype: torch.dtype) -> Run:
    layer = torch.nn.MultiheadAttention(256, 8, batch_first=True, device="cuda", dtype=dtype)
    x = rand(8, 128, 256, dtype=dtype, grad=True)

    def run() -> object:
        out, _ = layer(x, x, x, need_weights=False)
        return torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))

    return run
