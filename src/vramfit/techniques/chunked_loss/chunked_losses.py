"""What reduces deferred logits, a chunk at a time. See NOTE [Deferred logits].

Each function takes the arguments of torch's and gives NotImplemented where only the logits themselves would do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramfit.techniques.chunked_loss.chunks import LossSpec, apply_steps
from vramfit.techniques.chunked_loss.cross_entropy import chunked_cross_entropy
from vramfit.techniques.chunked_loss.deferred import Casting, DeferredLogits, default_rows

_NEVER = -(1 << 62)  # an index to ignore that no target has


def cross_entropy(
    x: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy``, with its arguments."""
    known = size_average is None and reduce is None and x.recipe.class_dim == 1
    if not known or x.recipe.normalised:
        return NotImplemented
    return _loss(x, target, weight, ignore_index, reduction, label_smoothing)


def nll_loss(
    x: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """``F.nll_loss`` of a log-softmax, with its arguments."""
    known = size_average is None and reduce is None and x.recipe.class_dim == 1
    if not known or not x.recipe.normalised:
        return NotImplemented
    return _loss(x, target, weight, ignore_index, reduction, 0.0)


def gather(x: DeferredLogits, dim: int, index: Tensor) -> Any:
    """The log-probability of one class in each row, as in losses of reinforcement learning."""
    at = x.recipe.class_dim
    one = tuple(1 if place == at else size for place, size in enumerate(x.recipe.shape))
    if not x.recipe.normalised or dim % x.dim() != at or tuple(index.shape) != one:
        return NotImplemented
    found = _loss(x, index.squeeze(at), None, _NEVER, "none", 0.0)
    return found if found is NotImplemented else -found.unsqueeze(at)


def _loss(
    x: DeferredLogits,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Any:
    """The loss in chunks; NotImplemented where torch has to find what is wrong, or where targets are probabilities."""
    recipe, family = x.recipe, x.family
    fits = (
        isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == recipe.rows.shape[:-1]
    )
    if (
        not fits
        or target.device != x.device
        or isinstance(target, DeferredLogits)
        or (class_weight is not None and class_weight.shape != (recipe.shape[recipe.class_dim],))
        or reduction not in ("mean", "sum", "none")
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return NotImplemented
    family.check()
    hidden = recipe.rows.reshape(-1, recipe.rows.shape[-1])
    casting = Casting.now(x.device.type)
    product = family.casting.of(family.weight.dtype)
    weight, bias = family.weight, family.bias
    if not recipe.attached:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    inputs = (hidden, weight, bias)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    # Gradients of a half-precision product need the backward pass's scale before they are rounded.
    fused = trains and not family.chunking.recompute and reduction != "none" and product != torch.float16
    spec = LossSpec(
        chunk_rows=_rows_of(x, hidden),
        fused=fused,
        product=product,
        into_grad=trains and family.chunking.into_grad,
        steps=recipe.steps,
        result=x.dtype if recipe.normalised else loss_dtype(x.dtype, casting),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    found = chunked_cross_entropy(hidden, weight, bias, target.reshape(-1), class_weight, spec)
    return found.reshape(target.shape) if reduction == "none" else found


def loss_dtype(dtype: torch.dtype, casting: Casting) -> torch.dtype:
    """The dtype of a loss: autocast takes log-softmax in 32 bits (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32)."""
    return torch.float32 if casting.enabled and dtype != torch.float64 else dtype


def _rows_of(x: DeferredLogits, hidden: Tensor) -> int:
    rows, width = hidden.shape
    return x.family.chunking.rows or default_rows(rows, width, x.recipe.shape[x.recipe.class_dim])


def argmax(x: DeferredLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """The most likely class of each row, as programs log it while they train."""
    if dim is None or dim % x.dim() != x.recipe.class_dim or x.recipe.normalised or not x.recipe.plain_rows:
        return NotImplemented
    family, hidden = x.family, x.recipe.rows.detach()
    family.check()
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = _rows_of(x, flat)
    with torch.no_grad():
        found = torch.empty(flat.shape[0], dtype=torch.int64, device=flat.device)
        for start in range(0, flat.shape[0], rows):
            part = family.product(flat[start : start + rows], family.weight, family.bias)
            found[start : start + rows] = apply_steps(part, x.recipe.steps).argmax(-1)
    return found.reshape(*hidden.shape[:-1], *((1,) if keepdim else ()))
