"""Why fused attention kernels refuse a call that the math kernel then serves: for reports; the choice is in `sdpa`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vramfit.trace.outcome import AttentionFallback, KernelRefusal
from vramfit.virtual.kernels.sdpa import SdpaBackend, gemm_alignment, priority
from vramfit.virtual.op_call import KernelContext

_HALVES = frozenset({torch.float16, torch.bfloat16})


def math_fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    enable_gqa: bool,
    is_causal: bool,
    location: str,
    ctx: KernelContext,
) -> AttentionFallback:
    """A call that the math kernel serves, with its scores and why each fused kernel refuses it.

    Args:
        query: shape (..., heads, length, head size).
        location: ``file:line`` of the program, empty if unknown.
    """
    dtype = query.dtype
    widened = dtype in _HALVES and not ctx.half_reduction_math_sdp
    shape = (*query.shape[:-1], key.shape[-2])
    return AttentionFallback(
        location=location or None,
        dtype=_name(dtype),
        scores=tuple(int(size) for size in shape),
        scores_dtype=_name(torch.float32 if widened else dtype),
        refused=tuple(_refusals(query, key, value, mask, enable_gqa, is_causal, ctx)),
    )


def _refusals(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    gqa: bool,
    causal: bool,
    ctx: KernelContext,
) -> Iterator[KernelRefusal]:
    order = priority(ctx)
    shared = _shared(query, key, value)
    dtype, size, value_size = query.dtype, query.shape[-1], value.shape[-1]
    halves = dtype in _HALVES and dtype == key.dtype == value.dtype
    lengths = query.dim() != 4
    flash = (
        ("is switched off", not ctx.flash_sdp),
        (f"wants four dimensions and not {query.dim()}", lengths),
        ("takes no mask", mask is not None),
        (f"takes no {_name(dtype)}", not halves),
        ("wants compute capability 8.0", ctx.capability[0] < 8),
        ("wants heads of one size up to 256", not size == key.shape[-1] == value_size or size > 256),
        ("takes no causal mask with different lengths", causal and query.shape[-2] != key.shape[-2]),
    )
    alignment = gemm_alignment(dtype, ctx)
    efficient = (
        ("is switched off", not ctx.mem_efficient_sdp),
        (f"wants four dimensions and not {query.dim()}", lengths),
        ("takes no enable_gqa before torch 2.14", gqa and shared and ctx.torch_version < (2, 14)),
        (f"takes no {_name(dtype)}", dtype is torch.float64 or not dtype == key.dtype == value.dtype),
        (
            "takes no bfloat16 before compute capability 8.0",
            dtype is torch.bfloat16 and ctx.capability[0] < 8,
        ),
        (f"wants head sizes in multiples of {alignment}", bool(size % alignment or value_size % alignment)),
        ("wants a mask whose last dimension is contiguous", mask is not None and mask.stride(-1) != 1),
    )
    cudnn = (
        ("is switched off", not ctx.cudnn_sdp or not ctx.cudnn),
        ("comes after the math kernel on this card", not _before_math(SdpaBackend.CUDNN, order)),
        (f"wants four dimensions and not {query.dim()}", lengths),
        ("is not deterministic", ctx.deterministic),
        (f"takes no {_name(dtype)}", not halves),
        ("takes no mask with a gradient", mask is not None and mask.requires_grad),
        ("wants a mask of two or four dimensions", mask is not None and mask.dim() not in (2, 4)),
    )
    for name, checks in (("flash", flash), ("memory-efficient", efficient), ("cuDNN", cudnn)):
        yield KernelRefusal(
            kernel=name, why=next((why for why, refuses in checks if refuses), "refuses these shapes")
        )


def _before_math(backend: SdpaBackend, order: tuple[SdpaBackend, ...]) -> bool:
    """Whether a backend is tried before the math kernel."""
    return backend in order[: order.index(SdpaBackend.MATH) if SdpaBackend.MATH in order else None]


def _shared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether heads of queries share those of keys or values."""
    return query.dim() > 2 and not query.shape[-3] == key.shape[-3] == value.shape[-3]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
