"""Matrix products: cuBLAS and cuBLASLt, layouts that need copies, batches, low precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, both, forward, rand, short
from vramfit.torch_internals.kernel_choice import addmm_activation, int_mm, scaled_mm

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

# By name: whether gradients are wanted, and the shapes of the operands.
_OPS: dict[str, tuple[Any, ...]] = {
    "mv/2048x1024/{}": (True, torch.mv, (2048, 1024), (1024,)),
    "addmm/inner/512/{}": (False, torch.addmm, (512, 512), (512, 256), (256, 512)),
    "addmm/bias/512/{}": (False, torch.addmm, (512,), (512, 256), (256, 512)),
    "addmm/bias/relu/512/{}": (False, addmm_activation, (512,), (512, 256), (256, 512)),
    "baddbmm/16x128/{}": (False, torch.baddbmm, (16, 128, 128), (16, 128, 64), (16, 64, 128)),
    "einsum/bhqd,bhkd/{}": (
        *(True, partial(torch.einsum, "bhqd,bhkd->bhqk")),
        *((4, 8, 128, 64), (4, 8, 128, 64)),
    ),
    "matmul/3d by 2d/{}/both": (True, torch.matmul, (8, 128, 256), (256, 512)),
    "outer/2048/{}": (False, torch.outer, (2048,), (2048,)),
}


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
        for name, (trained, function, *shapes) in _OPS.items():
            grid.add(name.format(short(dtype)), partial(_of_random, trained, function, shapes, dtype))
        grid.add(f"mm/out/512/{short(dtype)}", partial(_mm_out, dtype))
    grid.add("int_mm/512x512x512", _int_mm)
    grid.add("scaled_mm/512x512x512", _scaled_mm, priority=2)
    return grid.cases


def _mm(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return forward(torch.mm, rand(m, k, dtype=dtype), rand(k, n, dtype=dtype))


def _linear(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return _of_random(True, F.linear, [(m, k), (n, k), (n,)], dtype)


def _bmm(batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return _of_random(True, torch.bmm, [(batch, m, k), (batch, k, n)], dtype)


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


def _of_random(trained: bool, function: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Run:
    operands = [rand(*shape, dtype=dtype, grad=trained) for shape in shapes]
    return (both if trained else forward)(function, *operands)


def _mm_out(dtype: torch.dtype) -> Run:
    return forward(
        torch.mm, rand(512, 512, dtype=dtype), rand(512, 512, dtype=dtype), out=rand(512, 512, dtype=dtype)
    )


def _int_mm() -> Run:
    def small() -> torch.Tensor:
        return (torch.arange(512 * 512, device="cuda") % 17).to(torch.int8).reshape(512, 512)

    return forward(int_mm, small(), small())


def _scaled_mm() -> Run:
    left = rand(512, 512).to(torch.float8_e4m3fn)
    right = rand(512, 512).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return forward(scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
