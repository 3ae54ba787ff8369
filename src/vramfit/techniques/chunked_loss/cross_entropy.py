"""Cross-entropy of the logits that a linear layer would give, some rows at a time, so that all never exist at once.

What reduces `DeferredLogits` takes the arguments of torch's function, and gives NotImplemented where only the logits
themselves would do. See NOTE [Deferred logits].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramfit.techniques.chunked_loss.chunks import Head, LossSpec, Rows, apply_steps
from vramfit.techniques.chunked_loss.deferred import Casting, DeferredLogits, default_rows
from vramfit.torch_internals.autograd_engine import will_engine_execute_node


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    spec: LossSpec,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias``.

    Args:
        hidden: (rows, width).
        weight: (classes, width).
        bias: (classes,) or None.
        target: the class of each row, int64.
        class_weight: the weight of each class, or None.

    Returns:
        the loss: a scalar, or one of each row for the reduction ``none``.
    """
    found: torch.Tensor = _Chunked.apply(hidden, weight, bias, target, class_weight, spec)  # type: ignore[no-untyped-call]
    return found


class _Chunked(torch.autograd.Function):
    """NOTE [Gradients with the loss]: all gradients of a mean or a sum are known up to the factor that the backward
    pass brings. So they can be computed while a chunk's logits exist, and need no logits later; fused kernels such as
    Liger's do the same (Hsu et al. 2024, arXiv:2410.10989, section 3.2). They are multiplied in place when the factor
    comes, and given away; a second backward pass over the same graph computes them anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        spec: LossSpec,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.spec, ctx.gradients = spec, None
        ctx.leaf = weight if spec.into_grad else None
        ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias))
        rows = Rows(target, class_weight, spec, weight.shape[0])
        head = Head(hidden, weight, bias, spec)
        factor = rows.share_of_mean() if spec.reduction == "mean" else None
        if spec.fused:
            head.want(ctx.needs_input_grad)
        losses = torch.empty(hidden.shape[0], dtype=rows.dtype, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in head.chunks():
                logits = head.logits(chunk)
                losses[chunk] = rows.losses(logits, chunk)
                if spec.fused:
                    rows.gradients_(logits, chunk, factor)
                    head.add(logits, chunk)
                del logits
        if spec.fused:
            ctx.gradients = head.gradients()
        if spec.reduction == "none":
            return losses.to(spec.result)
        total = losses.sum()
        return (total if factor is None else total * factor).to(spec.result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec: LossSpec = ctx.spec
        found, ctx.gradients = ctx.gradients, None
        into = _open_gradient(ctx.leaf)
        if found is None:
            hidden, weight, bias, target, class_weight = ctx.saved_tensors
            rows = Rows(target, class_weight, spec, weight.shape[0])
            factor = grads[0].to(rows.dtype)
            if spec.reduction == "mean":
                factor = factor * rows.share_of_mean()
            head = Head(hidden, weight, bias, spec)
            head.want(ctx.needs_input_grad, into)
            with torch.autocast(hidden.device.type, enabled=False):
                for chunk in head.chunks():
                    logits = head.logits(chunk)
                    rows.losses(logits, chunk)
                    rows.gradients_(logits, chunk, factor[chunk] if factor.dim() else factor)
                    head.add(logits, chunk)
                    del logits
            found = head.gradients()
        else:
            for gradient in found:
                if gradient is not None:
                    gradient.mul_(grads[0])
            if into is not None and found[1] is not None:
                into.add_(found[1])
        if into is not None:
            found = (found[0], None, found[2])
        pairs = zip(found, ctx.dtypes, strict=True)
        return (*(None if g is None else g.to(dtype) for g, dtype in pairs), None, None, None)


def _open_gradient(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The ``grad`` of a weight, if adding to it now is what autograd would do in the end.

    Not where someone listens to gradients (hooks; whoever exchanges them between processes listens below Python), nor
    where the gradient is asked for by ``torch.autograd.grad``.
    """
    if weight is None or not weight.is_leaf or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    grad = weight.grad
    if grad is None or grad.requires_grad or grad.dtype != weight.dtype or not grad.is_contiguous():
        return None
    if grad.layout is not torch.strided or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return None
    try:
        ends = will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # torch.autograd.grad of this very weight
        return None
    return grad if ends else None


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
