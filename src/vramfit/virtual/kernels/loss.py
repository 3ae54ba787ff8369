"""Softmax and losses: contiguous copies, unreduced losses that are reduced at once.

aten/src/ATen/native/cuda/SoftMax.cu, NLLLoss2d.cu, Loss.cu, native/Loss.cpp.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.reduction import reduce_dense
from vramfit.virtual.kernels.rules import Rule, dense_copy, nbytes, table, temporaries, workspace
from vramfit.virtual.op_call import Extras, KernelContext, OpCall


def _softmax(call: OpCall) -> Extras | None:
    """``host_softmax``: input made contiguous."""
    return temporaries(dense_copy(call.args[0]))


def _softmax_backward(call: OpCall) -> Extras | None:
    """``softmax_backward_cuda_out`` multiplies gradient and output into a tensor of their size, beside the
    result; ``host_softmax_backward`` wants both contiguous."""
    grad, output = call.args[:2]
    return temporaries(nbytes(grad), dense_copy(grad), dense_copy(output))


def _log_softmax_backward(call: OpCall) -> Extras | None:
    return temporaries(dense_copy(call.args[0]), dense_copy(call.args[1]))


def _nll(call: OpCall) -> Extras | None:
    """``nll_loss_forward_out_cuda_template``: contiguous log-probabilities, targets and weights; of losses that
    are not reduced the weights alone."""
    weight = call.argument(2, "weight")
    if call.argument(3, "reduction", 1) == 0 and call.args[0].dim() != 1:
        return temporaries(dense_copy(weight))
    return temporaries(dense_copy(call.args[0]), dense_copy(call.args[1]), dense_copy(weight))


def _nll_backward(call: OpCall) -> Extras | None:
    """``nll_loss_backward_out_cuda_template`` copies what is not dense; it does not read the log-probabilities."""
    weight = call.argument(3, "weight")
    if call.argument(4, "reduction", 1) == 0 and call.args[1].dim() != 1:
        return temporaries(dense_copy(weight))
    return temporaries(dense_copy(call.args[0]), dense_copy(call.args[2]), dense_copy(weight))


def _reducing(count: int, dtype: torch.dtype, ctx: KernelContext) -> tuple[int, ...]:
    """Partial results of reducing so many unreduced losses, which lie densely."""
    found = reduce_dense(count, dtype, ctx)
    return found.after if found is not None else ()


def _elementwise_loss(call: OpCall) -> Extras | None:
    """``mse_loss_out``, ``smooth_l1_loss_out``: the unreduced loss, reduced into the result.

    The result's own storage is as large (see metas.py), so a reduced loss takes the size twice for a moment.
    """
    if call.argument(2, "reduction", 1) == 0:
        return None
    count = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape).numel()
    return temporaries(count * call.out.element_size(), *_reducing(count, call.out.dtype, call.context))


def _huber(call: OpCall) -> Extras | None:
    """``huber_loss``: the unreduced loss exists first, then its mean (Loss.cpp)."""
    if call.argument(2, "reduction", 1) == 0:
        return None
    count = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape).numel()
    if not count:
        return None
    return Extras((count * call.out.element_size(),), _reducing(count, call.out.dtype, call.context))


def _bce(call: OpCall) -> Extras | None:
    """``binary_cross_entropy_out_cuda``: the reduced scalar, which is copied into the whole-size result."""
    if call.argument(3, "reduction", 1) == 0:
        return None
    count = call.args[0].numel()
    return Extras(after=(call.out.element_size(), *_reducing(count, call.out.dtype, call.context)))


def _multilabel(call: OpCall) -> Extras | None:
    """``multilabel_margin_loss_forward``: one loss a row before they are summed
    (MultiLabelMarginCriterion.cu)."""
    source = call.args[0]
    if call.argument(2, "reduction", 1) == 0 or source.dim() < 2:
        return workspace(dense_copy(source))
    return Extras(tuple(s for s in (dense_copy(source),) if s), (source.shape[0] * source.element_size(),))


RULES: dict[OpOverload, Rule] = table(
    {
        ("_softmax", "_log_softmax"): _softmax,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _log_softmax_backward,
        ("nll_loss_forward", "nll_loss2d_forward"): _nll,
        ("nll_loss_backward", "nll_loss2d_backward"): _nll_backward,
        ("mse_loss", "smooth_l1_loss"): _elementwise_loss,
        "huber_loss": _huber,
        "binary_cross_entropy": _bce,
        ("multilabel_margin_loss_forward", "multi_margin_loss"): _multilabel,
    }
)
