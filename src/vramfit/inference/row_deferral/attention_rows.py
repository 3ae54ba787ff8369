"""Scaled dot-product attention where no fused kernel takes it: step by step, so that scores can be deferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals.kernel_choice import fused_sdp_choice

MATH = 0
"""The number of the backend that writes all scores out (ATen/SDPBackend.h)."""


def bind_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Callable[[], torch.Tensor] | None:
    """Attention in steps, for a call of ``F.scaled_dot_product_attention`` that would write all scores out.

    Args:
        query: (..., length, head size).
        key, value: (..., length of the keys, head size).
        options: ``scale`` and ``enable_gqa``, as torch takes them.

    Returns:
        a function that computes the call; None where a fused kernel takes it, or where weights are dropped.
    """
    scale, grouped = options.get("scale"), bool(options.get("enable_gqa", False))
    if dropout_p or query.dim() < 3 or set(options) - {"scale", "enable_gqa"}:
        return None
    backend = fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )
    if backend != MATH:
        return None

    def attend() -> torch.Tensor:
        keys, values = (_repeated(one, query) if grouped else one for one in (key, value))
        # Half of the scale on either side, as torch does it (ATen/native/transformers/attention.cpp).
        factor = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
        scores = (query * factor) @ (keys * factor).transpose(-2, -1)
        mask = _causal(scores.shape, query.device) if is_causal else attn_mask
        if mask is not None:
            allowed = mask.dtype == torch.bool
            scores = scores.masked_fill(mask.logical_not(), -torch.inf) if allowed else scores + mask
        weights = torch.softmax(scores, -1)
        if mask is not None and mask.dtype == torch.bool:
            # A row in which nothing is allowed gives zeros in torch (``_safe_softmax``).
            weights = weights.masked_fill(mask.any(-1, keepdim=True).logical_not(), 0.0)
        found: torch.Tensor = weights @ values
        return found

    return attend


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3)


def _causal(shape: torch.Size, device: torch.device) -> torch.Tensor:
    return torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()
