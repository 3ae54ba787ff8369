"""Composite ops that a CPU build takes apart before Python sees them, kept whole as a card keeps them.

A kernel registered for CUDA's dispatch keys wins over the composite one. On a CUDA build those kernels exist already
and are left alone, except for attention, whose choice of backend asks the card.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.kernels import sdpa
from vramfit.virtual.op_runner import OpRunner

# Ops with a CUDA kernel that CPU builds decompose; the placeholder is never run: our mode takes them before.
_WHOLE_ON_CARD = (
    "silu_backward",
    "mish_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Register the CUDA kernels that this build lacks."""
    library = torch.library.Library("aten", "IMPL")
    patches.call(library._destroy)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        context = mode.workspaces.context(query.device.index or 0)
        return sdpa.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, context
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding a kernel on purpose
        for dispatch_key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, dispatch_key)
        for name in _WHOLE_ON_CARD:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _unreachable(name), "CUDA")


def _unreachable(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name} reached a kernel on the virtual GPU")

    return kernel
