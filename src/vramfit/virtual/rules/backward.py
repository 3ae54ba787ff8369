"""Ops that torch has CUDA kernels for but no description by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vramfit.virtual.rules.registry import rule

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode

_NO_REDUCTION = 0  # at::Reduction::None


@rule(
    "aten.multi_margin_loss_backward.default",
    "aten.multilabel_margin_loss_backward.default",
    "aten.fractional_max_pool3d_backward.default",
    "aten.adaptive_max_pool3d_backward.default",
    "aten._pdist_backward.default",
    "aten.glu_jvp.default",
)
def like_input(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient shaped like the op's input, which follows the incoming gradient among the arguments."""
    out = mode.fake_like(args[1])
    mode.settle(func, mode.ops[func], args, kwargs, out)
    return out


@rule("aten.multi_margin_loss.default")
def multi_margin_loss(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One loss per sample, or one for all."""
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    source: torch.Tensor = bound["self"]
    each = bound.get("reduction", 1) == _NO_REDUCTION and source.dim() > 1
    out = mode.fake_empty((source.shape[0],) if each else (), source.dtype, source.device)
    mode.settle(func, mode.ops[func], args, kwargs, out)
    return out


@rule("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss and a mask of the targets."""
    source, _, reduction = args
    each = reduction == _NO_REDUCTION and source.dim() > 1
    loss = mode.fake_empty((source.shape[0],) if each else (), source.dtype, source.device)
    out = (loss, mode.fake_like(source))
    mode.settle(func, mode.ops[func], args, kwargs, out)
    return out


@rule("aten._nested_tensor_from_mask_left_aligned.default")
def left_aligned(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a padding mask is left-aligned: no, so that an encoder keeps to dense tensors."""
    mode.machine.warn(
        "nested-tensors-avoided",
        "an encoder's fast path would use nested tensors on a card; dense ones are counted, which need no less memory",
    )
    return False
