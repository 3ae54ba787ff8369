"""cuDNN's recurrent networks: copies of sequences, and the workspace of a pass, which is an estimate.

aten/src/ATen/native/cudnn/RNN.cpp. ``_cudnn_rnn`` makes a dense copy of a sequence that lies batch first, then its
results, then a uint8 workspace whose size the library names (``cudnnGetRNNTempSpaceSizes``), beside the reserve that
training keeps. ``_cudnn_rnn_backward`` makes zeros for the gradients of states that nobody used, and runs two passes
with a workspace each: for the data (``_cudnn_rnn_backward_input``), then for the weights. Weights that do not lie in
one buffer (``flatten_parameters``) are copied into one at every call, which is kept for backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, nbytes, table
from vramfit.virtual.op_call import Extras, OpCall, argument

# Gates of cuDNN's modes (cudnnRNNMode_t): RELU, TANH, LSTM, GRU.
_GATES = (1, 1, 4, 3)


def reserve_bytes(
    mode: int, steps: int, batch: int, hidden: int, layers: int, directions: int, element: int
) -> int:
    """Bytes that training keeps from forward to backward: gates, cell and hidden state of every step and
    layer.

    Args:
        mode: 0 ReLU, 1 tanh, 2 LSTM, 3 GRU.
        directions: 2 when bidirectional.
        element: bytes of an element.
    """
    values = _GATES[mode] + (2 if mode == 2 else 1)
    return steps * batch * hidden * layers * directions * values * element


def forward_reserve(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the reserve of one ``_cudnn_rnn`` call; 0 outside training."""
    given = partial(argument, args, kwargs)
    if not given(12, "train", False):
        return 0
    source, lengths = args[0], given(14, "batch_sizes", [])
    rows = source.shape[0] if len(lengths) else source.shape[0] * source.shape[1]
    directions = 2 if given(13, "bidirectional", False) else 1
    mode, hidden, layers = given(6, "mode"), given(7, "hidden_size"), given(9, "num_layers")
    return reserve_bytes(mode, 1, rows, hidden, layers, directions, source.element_size())


def _gate_bytes(source: torch.Tensor, mode: int, hidden: int, bidirectional: bool) -> int:
    """Gate products of one layer over the whole sequence."""
    rows = math.prod(source.shape[:-1])
    return rows * hidden * _GATES[mode] * (2 if bidirectional else 1) * source.element_size()


def _sequence_copy(tensor: torch.Tensor | None, batch_first: bool) -> int:
    """Bytes of the dense copy of a sequence, time first."""
    if tensor is None:
        return 0
    ordered = tensor.transpose(0, 1) if batch_first and tensor.dim() == 3 else tensor
    return 0 if ordered.is_contiguous() else nbytes(tensor)


def _workspace(call: OpCall) -> Extras | None:
    """Gate products of one layer; as uncertain as large, and a third of the reserve besides."""
    mode, hidden = call.argument(6, "mode"), call.argument(7, "hidden_size")
    size = _gate_bytes(call.args[0], mode, hidden, call.argument(13, "bidirectional", False))
    if not size:
        return None
    copy = _sequence_copy(call.args[0], call.argument(10, "batch_first", False))
    doubt = size + forward_reserve(call.args, call.kwargs) // 3
    return Extras(before=(copy,) if copy else (), after=(size,), error_bytes=doubt, error_below_bytes=doubt)


def _backward_workspace(call: OpCall) -> Extras | None:
    """``_cudnn_rnn_backward(input, weight, stride0, buf, hx, cx, output, grad_output, grad_hy, grad_cy, mode,
    hidden, ...)``, whose weights' gradients are one buffer here."""
    mode, hidden = call.argument(10, "mode"), call.argument(11, "hidden_size")
    size = _gate_bytes(call.args[0], mode, hidden, call.argument(17, "bidirectional", False))
    if not size:
        return None
    source, hx, cx, output = call.args[0], call.args[4], call.args[5], call.args[6]
    batch_first = call.argument(14, "batch_first", False)
    zeros = [
        nbytes(like)
        for like, grad in zip((output, hx, cx), call.args[7:10], strict=True)
        if grad is None and like is not None
    ]
    copies = [_sequence_copy(source, batch_first), _sequence_copy(call.args[7], batch_first)]
    reserve = call.argument(20, "reserve")
    doubt = size + (0 if reserve is None else nbytes(reserve) // 3)
    return Extras(
        before=tuple(zeros),
        between=((), (), tuple(s for s in (*copies, size) if s), tuple(s for s in (copies[0], size) if s)),
        error_bytes=doubt,
        error_below_bytes=doubt,
    )


RULES: dict[OpOverload, Rule] = table({"_cudnn_rnn": _workspace, "_cudnn_rnn_backward": _backward_workspace})
