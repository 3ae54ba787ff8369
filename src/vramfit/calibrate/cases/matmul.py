"""Matrix products: cuBLAS and cuBLASLt, layouts that need copies, batches, low precision."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, both, forward, rand, short

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)
_SHAPES = (
    (64, 64, 64),
    (512, 512, 512),
    (4096, 4096, 4096),
    (1, 4096, 4096),
    (1024, 1000, 77),
    (8192, 1024, 128),
)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.MATMUL)
    for m, n, k in _SHAPES:
        for dtype in _FLOATS:
            name = f"{m}x{n}x{k}/{short(dtype)}"
            first = 0 if (m, n, k) == (4096, 4096, 4096) else 1
            if dtype is not torch.float16:
                grid.add(f"mm/{name}", partial(_mm, m, n, k, dtype), priority=first)
            grid.add(f"linear/{name}/both", partial(_linear, m, n, k, dtype), priority=first)
        grid.add(f"mm/{m}x{n}x{k}/tf32", partial(_mm, m, n, k, torch.float32), Flag.TF32)
    for dtype in (torch.float64, torch.complex64):
        grid.add(f"mm/512x512x512/{short(dtype)}", partial(_mm, 512, 512, 512, dtype))
    for batch, m, n, k in ((8, 128, 128, 64), (96, 512, 64, 512), (2, 77, 77, 40), (1, 1024, 1024, 1024)):
        for dtype in _FLOATS:
            grid.add(f"bmm/{batch}x{m}x{n}x{k}/{short(dtype)}", partial(_bmm, batch, m, n, k, dtype))
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("transposed", "strided", "overlapping", "rows apart"):
            grid.add(f"mm/256x320x192/{layout}/{short(dtype)}", partial(_laid_out, layout, dtype))
            grid.add(f"bmm/6x256x320x192/{layout}/{short(dtype)}", partial(_laid_out, layout, dtype, batch=6))
        grid.add(f"mv/2048x1024/{short(dtype)}", partial(_mv, dtype))
        grid.add(f"addmm/inner/512/{short(dtype)}", partial(_addmm, dtype, None))
        grid.add(f"addmm/bias/512/{short(dtype)}", partial(_addmm, dtype, 512))
        grid.add(f"addmm/bias/relu/512/{short(dtype)}", partial(_addmm_relu, dtype))
        grid.add(f"baddbmm/16x128/{short(dtype)}", partial(_baddbmm, dtype))
        grid.add(f"einsum/bhqd,bhkd/{short(dtype)}", partial(_einsum, dtype))
        grid.add(f"matmul/3d by 2d/{short(dtype)}/both", partial(_matmul, dtype))
        grid.add(f"outer/2048/{short(dtype)}", partial(_outer, dtype))
        grid.add(f"mm/out/512/{short(dtype)}", partial(_mm_out, dtype))
    grid.add("int_mm/512x512x512", _int_mm)
    grid.add("scaled_mm/512x512x512", _scaled_mm, priority=2)
    return grid.cases


def _mm(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    if dtype.is_complex:
        return forward(torch.mm, rand(m, k).to(dtype), rand(k, n).to(dtype))
    return forward(torch.mm, rand(m, k, dtype=dtype), rand(k, n, dtype=dtype))


def _linear(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return both(
        F.linear,
        rand(m, k, dtype=dtype, grad=True),
        rand(n, k, dtype=dtype, grad=True),
        rand(n, dtype=dtype, grad=True),
    )


def _bmm(batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return both(
        torch.bmm, rand(batch, m, k, dtype=dtype, grad=True), rand(batch, k, n, dtype=dtype, grad=True)
    )


def _laid_out(layout: str, dtype: torch.dtype, batch: int = 0) -> Run:
    lead = (batch,) if batch else ()
    right = rand(*lead, 192, 320, dtype=dtype)
    if layout == "transposed":
        left = rand(*lead, 192, 256, dtype=dtype).mT
    elif layout == "strided":
        left = rand(*lead, 256, 384, dtype=dtype)[..., ::2]
    elif layout == "overlapping":
        left = rand(*lead, 1, 192, dtype=dtype).expand(*lead, 256, 192)
    else:
        left = rand(*lead, 256, 256, dtype=dtype)[..., :192]
    return forward(torch.bmm if batch else torch.mm, left, right)


def _mv(dtype: torch.dtype) -> Run:
    return both(torch.mv, rand(2048, 1024, dtype=dtype, grad=True), rand(1024, dtype=dtype, grad=True))


def _addmm(dtype: torch.dtype, bias: int | None) -> Run:
    added = rand(512, 512, dtype=dtype) if bias is None else rand(bias, dtype=dtype)
    return forward(torch.addmm, added, rand(512, 256, dtype=dtype), rand(256, 512, dtype=dtype))


def _addmm_relu(dtype: torch.dtype) -> Run:
    return forward(
        torch._addmm_activation,
        rand(512, dtype=dtype),
        rand(512, 256, dtype=dtype),
        rand(256, 512, dtype=dtype),
    )


def _baddbmm(dtype: torch.dtype) -> Run:
    return forward(
        torch.baddbmm,
        rand(16, 128, 128, dtype=dtype),
        rand(16, 128, 64, dtype=dtype),
        rand(16, 64, 128, dtype=dtype),
    )


def _einsum(dtype: torch.dtype) -> Run:
    return both(
        torch.einsum,
        "bhqd,bhkd->bhqk",
        rand(4, 8, 128, 64, dtype=dtype, grad=True),
        rand(4, 8, 128, 64, dtype=dtype, grad=True),
    )


def _matmul(dtype: torch.dtype) -> Run:
    return both(
        torch.matmul, rand(8, 128, 256, dtype=dtype, grad=True), rand(256, 512, dtype=dtype, grad=True)
    )


def _outer(dtype: torch.dtype) -> Run:
    return forward(torch.outer, rand(2048, dtype=dtype), rand(2048, dtype=dtype))


def _mm_out(dtype: torch.dtype) -> Run:
    return forward(
        torch.mm, rand(512, 512, dtype=dtype), rand(512, 512, dtype=dtype), out=rand(512, 512, dtype=dtype)
    )


def _int_mm() -> Run:
    def small() -> torch.Tensor:
        return (torch.arange(512 * 512, device="cuda") % 17).to(torch.int8).reshape(512, 512)

    return forward(torch._int_mm, small(), small())


def _scaled_mm() -> Run:
    left = rand(512, 512).to(torch.float8_e4m3fn)
    right = rand(512, 512).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return forward(torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
