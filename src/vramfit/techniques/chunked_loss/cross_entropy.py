"""Cross-entropy of the logits that a linear layer would give, some rows at a time, so that all never exist at once."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.techniques.chunked_loss.chunks import Head, LossSpec, Rows


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
        spec: how it is computed.

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
        ends = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # torch.autograd.grad of this very weight
        return None
    return grad if ends else None
