"""cuDNN's recurrent networks: copies of sequences, and the workspace of a pass, which is an estimate.

aten/src/ATen/native/cudnn/RNN.cpp. ``_cudnn_rnn`` makes a dense copy of a sequence that lies batch first, then its
results, then a uint8 workspace whose size the library names (``cudnnGetRNNTempSpaceSizes``), and the reserve that
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

_KEPT = (2, 2, 5, 6)
"""Planes that a layer of each mode keeps for backward, beside what it hands to the next one."""

_RECORDED = (2, 3)
"""Modes of which recordings of a card exist."""


def reserve_bytes(
    mode: int,
    steps: int,
    batch: int,
    hidden: int,
    layers: int,
    directions: int,
    element: int,
    dropout: float = 0.0,
) -> int:
    """Bytes that training keeps from forward to backward.

    In planes of an element for each step, example, unit and direction. The rest are masks of dropout between layers:
    a bit for each element that a direction reads. To the byte what an H100 with cuDNN 9 kept of a network of two LSTM
    layers, of two that run both ways in float16, and of three GRU layers (benchmarks/recordings).

    Args:
        mode: 0 ReLU, 1 tanh, 2 LSTM, 3 GRU.
        directions: 2 when bidirectional.
        element: bytes of an element.
        dropout: its probability.
    """
    elements = steps * batch * hidden * directions
    masks = (layers - 1) * directions * elements // 8 if dropout else 0
    return elements * element * (layers * _KEPT[mode] + layers - 1) + masks + 256


def forward_reserve(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the reserve of one ``_cudnn_rnn`` call; 0 outside training."""
    given = partial(argument, args, kwargs)
    if not given(12, "train", False):
        return 0
    source, lengths = args[0], given(14, "batch_sizes", [])
    rows = source.shape[0] if len(lengths) else source.shape[0] * source.shape[1]
    directions = 2 if given(13, "bidirectional", False) else 1
    mode, hidden, layers = given(6, "mode"), given(7, "hidden_size"), given(9, "num_layers")
    dropout = given(11, "dropout", 0.0)
    return reserve_bytes(mode, 1, rows, hidden, layers, directions, source.element_size(), dropout)


def _gate_bytes(source: torch.Tensor, mode: int, hidden: int, bidirectional: bool) -> int:
    """Gate products of one layer over the whole sequence."""
    rows = math.prod(source.shape[:-1])
    return rows * hidden * _GATES[mode] * (2 if bidirectional else 1) * source.element_size()


def _training_workspace(
    source: torch.Tensor, states: torch.Tensor, mode: int, hidden: int, bidirectional: bool
) -> int:
    """What each pass of training takes while it runs: the same for all three, as recorded (see `reserve_bytes`).

    Twelve planes, fourteen both ways, and states of one step for each gate. What decides these numbers is not known,
    nor is it for modes that no card was recorded with: those are taken to need the gate products of one layer.

    Args:
        source: ``[steps, batch, inputs]``, batch first, or packed.
        states: ``[layers, batch, hidden]``.
    """
    rows = math.prod(source.shape[:-1])
    if mode not in _RECORDED or not rows:
        return _gate_bytes(source, mode, hidden, bidirectional)
    planes, of_gates = (28, 44) if bidirectional else (12, 5)
    batch = states.shape[1]
    return (rows * planes + batch * _GATES[mode] * of_gates) * hidden * source.element_size() + 512


def _sequence_copy(tensor: torch.Tensor | None, batch_first: bool) -> int:
    """Bytes of the dense copy of a sequence, time first."""
    if tensor is None:
        return 0
    ordered = tensor.transpose(0, 1) if batch_first and tensor.dim() == 3 else tensor
    return 0 if ordered.is_contiguous() else nbytes(tensor)


def _workspace(call: OpCall) -> Extras | None:
    """The workspace of a pass, before the reserve is taken in training; how far either may be off is a guess."""
    mode, hidden = call.argument(6, "mode"), call.argument(7, "hidden_size")
    both_ways = call.argument(13, "bidirectional", False)
    copy = _sequence_copy(call.args[0], call.argument(10, "batch_first", False))
    before = (copy,) if copy else ()
    reserve = forward_reserve(call.args, call.kwargs)
    if not reserve:
        size = _gate_bytes(call.args[0], mode, hidden, both_ways)
        if not size:
            return None
        return Extras(before=before, after=(size,), error_bytes=size, error_below_bytes=size)
    size = _training_workspace(call.args[0], call.args[4], mode, hidden, both_ways)
    doubt, kept = _doubt(size, mode), reserve // (10 if mode in _RECORDED else 3)
    return Extras(
        before=(*before, size), error_bytes=doubt, error_below_bytes=doubt, kept_errors=((3, kept, kept),)
    )


def _doubt(size: int, mode: int) -> int:
    """Bytes by which a workspace of training may be off."""
    return size // 3 if mode in _RECORDED else size


def _backward_workspace(call: OpCall) -> Extras | None:
    """``_cudnn_rnn_backward(input, weight, stride0, buf, hx, cx, output, grad_output, grad_hy, grad_cy, mode,
    hidden, ...)``, whose weights' gradients are one buffer here."""
    mode, hidden = call.argument(10, "mode"), call.argument(11, "hidden_size")
    source, hx, cx, output = call.args[0], call.args[4], call.args[5], call.args[6]
    size = _training_workspace(source, hx, mode, hidden, call.argument(17, "bidirectional", False))
    if not size:
        return None
    batch_first = call.argument(14, "batch_first", False)
    zeros = [
        nbytes(like)
        for like, grad in zip((output, hx, cx), call.args[7:10], strict=True)
        if grad is None and like is not None
    ]
    copies = [_sequence_copy(source, batch_first), _sequence_copy(call.args[7], batch_first)]
    doubt = _doubt(size, mode)
    return Extras(
        before=tuple(zeros),
        between=((), (), tuple(s for s in (*copies, size) if s), tuple(s for s in (copies[0], size) if s)),
        error_bytes=doubt,
        error_below_bytes=doubt,
    )


RULES: dict[OpOverload, Rule] = table({"_cudnn_rnn": _workspace, "_cudnn_rnn_backward": _backward_workspace})
