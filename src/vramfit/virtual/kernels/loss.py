"""Softmax and losses: contiguous copies, unreduced losses that are reduced at once.

aten/src/ATen/native/cuda/SoftMax.cu, NLLLoss2d.cu, Loss.cu, native/Loss.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.kernels.context import (
    Args,
    Extras,
    KernelContext,
    Kwargs,
    Rule,
    argument,
    nbytes,
    table,
    temporaries,
    workspace,
)
from vramfit.virtual.kernels.reduction import reduce_extras


def _copy(tensor: Any) -> int:
    return 0 if not isinstance(tensor, torch.Tensor) or tensor.is_contiguous() else nbytes(tensor)


def _softmax(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``host_softmax``: input made contiguous."""
    del kwargs, outputs, ctx
    return temporaries(_copy(args[0]))


def _softmax_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``softmax_backward_cuda_out`` multiplies gradient and output into a tensor of their size, beside the
    result."""
    del kwargs, outputs, ctx
    grad, output = args[:2]
    return temporaries(nbytes(grad), _copy(output))


def _log_softmax_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    del kwargs, outputs, ctx
    return temporaries(_copy(args[0]), _copy(args[1]))


def _nll(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``nll_loss_forward_out_cuda_template``: contiguous log-probabilities, targets and weights."""
    del outputs, ctx
    weight = argument(args, kwargs, 2, "weight")
    return temporaries(_copy(args[0]), _copy(args[1]), _copy(weight))


def _nll_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``nll_loss_backward_out_cuda_template``: likewise, with the gradient."""
    del kwargs, outputs, ctx
    return temporaries(_copy(args[0]), _copy(args[2]), _copy(args[3]))


def _elementwise_loss(position: int) -> Rule:
    """``mse_loss_out``, ``smooth_l1_loss_out``: the unreduced loss, reduced into the result.

    The result's own storage is as large (see metas.py), so a reduced loss takes the size twice for a moment.
    """

    def rule(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
        del ctx
        if argument(args, kwargs, position, "reduction", 1) == 0:
            return None
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        element = outputs.element_size()
        return Extras(after=(shape.numel() * element,)) if shape.numel() else None

    return rule


def _huber(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``huber_loss``: the unreduced loss exists first, then its mean (Loss.cpp)."""
    del ctx
    if argument(args, kwargs, 2, "reduction", 1) == 0:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return workspace(shape.numel() * outputs.element_size())


def _bce(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``binary_cross_entropy_out_cuda``: the reduced scalar, which is copied into the whole-size result."""
    if argument(args, kwargs, 3, "reduction", 1) == 0:
        return None
    reducing = reduce_extras(args[0], None, max(4, outputs.element_size()), ctx)
    return Extras(after=(outputs.element_size(), *(reducing.after if reducing else ())))


def _multilabel(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``multilabel_margin_loss_forward``: one loss a row before they are summed
    (MultiLabelMarginCriterion.cu)."""
    del ctx, outputs
    source = args[0]
    if argument(args, kwargs, 2, "reduction", 1) == 0 or source.dim() < 2:
        return workspace(_copy(source))
    return Extras(tuple(s for s in (_copy(source),) if s), (source.shape[0] * source.element_size(),))


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        ("_softmax", "_log_softmax"): _softmax,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _log_softmax_backward,
        ("nll_loss_forward", "nll_loss2d_forward"): _nll,
        ("nll_loss_backward", "nll_loss2d_backward"): _nll_backward,
        ("mse_loss", "smooth_l1_loss"): _elementwise_loss(2),
        "huber_loss": _huber,
        "binary_cross_entropy": _bce,
        ("multilabel_margin_loss_forward", "multi_margin_loss"): _multilabel,
    }
)
