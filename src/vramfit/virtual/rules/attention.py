"""Attention that arrives whole, as it does in inference mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vramfit.virtual.kernels import sdpa
from vramfit.virtual.rules.registry import rule

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode


@rule("aten.scaled_dot_product_attention.default")
def attention(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Choose the backend as a card does; the ops of that backend come back to the mode."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    given = defaults | dict(zip(names, args, strict=False)) | kwargs
    context = mode.workspaces.context(given["query"].device.index or 0)
    with mode:
        return sdpa.scaled_dot_product_attention(ctx=context, **given)
