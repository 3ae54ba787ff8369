"""cuDNN's recurrent networks: the workspace of a pass. An estimate: the library names its size.

aten/src/ATen/native/cudnn/RNN.cpp, ``_cudnn_rnn`` and ``_cudnn_rnn_backward``: a uint8 workspace of
``cudnnGetRNNTempSpaceSizes`` for each pass, beside the reserve that training keeps.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vramfit.virtual.kernels.context import (
    Args,
    Extras,
    KernelContext,
    Kwargs,
    Rule,
    argument,
    table,
)

# Gates of cuDNN's modes (cudnnRNNMode_t): RELU, TANH, LSTM, GRU.
_GATES = (1, 1, 4, 3)


def reserve_bytes(
    mode: int, steps: int, batch: int, hidden: int, layers: int, directions: int, element: int
) -> int:
    """Bytes that training keeps from forward to backward: gates, cell and hidden state of every step and
    layer.

    Args:
        mode: 0 ReLU, 1 tanh, 2 LSTM, 3 GRU.
        steps: sequence length.
        batch: batch size.
        hidden: hidden size.
        layers: layers.
        directions: 2 when bidirectional.
        element: bytes of an element.
    """
    values = _GATES[mode] + (2 if mode == 2 else 1)
    return steps * batch * hidden * layers * directions * values * element


def forward_reserve(args: Args, kwargs: Kwargs) -> int:
    """Bytes of the reserve of one ``_cudnn_rnn`` call; 0 outside training."""
    if not argument(args, kwargs, 12, "train", False):
        return 0
    source, lengths = args[0], argument(args, kwargs, 14, "batch_sizes", [])
    rows = source.shape[0] if len(lengths) else source.shape[0] * source.shape[1]
    return reserve_bytes(
        argument(args, kwargs, 6, "mode"),
        *(1, rows),
        argument(args, kwargs, 7, "hidden_size"),
        argument(args, kwargs, 9, "num_layers"),
        2 if argument(args, kwargs, 13, "bidirectional", False) else 1,
        source.element_size(),
    )


def _gate_bytes(source: torch.Tensor, mode: int, hidden: int, bidirectional: bool) -> int:
    """Gate products of one layer over the whole sequence."""
    rows = math.prod(source.shape[:-1])
    return rows * hidden * _GATES[mode] * (2 if bidirectional else 1) * source.element_size()


def _workspace(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """Gate products of one layer; as uncertain as large, and a third of the reserve besides."""
    del outputs, ctx
    mode, hidden = argument(args, kwargs, 6, "mode"), argument(args, kwargs, 7, "hidden_size")
    size = _gate_bytes(args[0], mode, hidden, argument(args, kwargs, 13, "bidirectional", False))
    return Extras(after=(size,), error_bytes=size + forward_reserve(args, kwargs) // 3) if size else None


def _backward_workspace(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``_cudnn_rnn_backward(input, weight, stride0, buf, hx, cx, output, 3 gradients, mode, hidden,
    ...)``."""
    del outputs, ctx
    mode, hidden = argument(args, kwargs, 10, "mode"), argument(args, kwargs, 11, "hidden_size")
    size = _gate_bytes(args[0], mode, hidden, argument(args, kwargs, 17, "bidirectional", False))
    return Extras(after=(size,), error_bytes=size) if size else None


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {"_cudnn_rnn": _workspace, "_cudnn_rnn_backward": _backward_workspace}
)
