"""cuDNN's recurrent op and its backward."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner


@rule("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward(mode: OpRunner, call: OpCall) -> Any:
    """Gradients shaped like the inputs; the weights' gradients are views of one buffer, as in cudnn/RNN.cpp."""
    bound = call.by_name()
    wanted = bound["output_mask"]
    data, hx, cx, weights, buffer = (bound[k] for k in ("input", "hx", "cx", "weight", "weight_buf"))
    grad_input = mode.fake_like(data) if wanted[0] else None
    grad_hx = mode.fake_like(hx) if wanted[1] else None
    grad_cx = mode.fake_like(cx) if wanted[2] and cx is not None else None
    grads: list[torch.Tensor] = []
    flat = None
    if wanted[3]:
        count = buffer.numel() if buffer is not None and buffer.numel() else sum(w.numel() for w in weights)
        flat = mode.fake_empty((count,), weights[0].dtype, data.device)
    out = (grad_input, grad_hx, grad_cx, flat)
    mode.settle(call, out)
    if flat is not None:
        offset = 0
        for weight in weights:
            piece = torch.ops.aten.slice.Tensor(flat, 0, offset, offset + weight.numel())
            grads.append(torch.ops.aten.view.default(piece, list(weight.shape)))
            offset += weight.numel()
    return (grad_input, grad_hx, grad_cx, grads)


@rule("aten._thnn_fused_gru_cell.default")
def gru_cell(mode: OpRunner, call: OpCall) -> Any:
    """The new state, and a workspace for backward (native/cuda/RNN.cu, GRU_WORKSPACE_MULTIPLIER)."""
    hx: torch.Tensor = call.args[2]
    out = (mode.fake_like(hx), mode.fake_empty((hx.shape[0], 5 * hx.shape[1]), hx.dtype, hx.device))
    mode.settle(call, out)
    return out


@rule("aten._thnn_fused_gru_cell_backward.default")
def gru_cell_backward(mode: OpRunner, call: OpCall) -> Any:
    """Gradients of both gate products, of the state, and of the biases (native/cuda/RNN.cu)."""
    grad, workspace, has_bias = call.args
    batch, size = workspace.shape[0], workspace.shape[1] // 5

    def empty(*shape: int) -> torch.Tensor:
        return mode.fake_empty(shape, workspace.dtype, workspace.device)

    biases = (empty(3 * size), empty(3 * size)) if has_bias else (None, None)
    out = (empty(batch, 3 * size), empty(batch, 3 * size), mode.fake_like(grad), *biases)
    mode.settle(call, out)
    return out
