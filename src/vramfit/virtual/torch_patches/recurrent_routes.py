"""Recurrent layers take the way of a card: one call of cuDNN for a stack of layers.

NOTE [Recurrent layers]
``torch._VF.lstm`` and its relatives decide in C++ whether cuDNN runs, and call it through a table that only CUDA builds
fill (aten/src/ATen/native/RNN.cpp, ``lstm_cudnn_stub``); a CPU build takes them apart into hundreds of small ops. So
the decision is made here, and leads to ``aten._cudnn_rnn``, which autograd knows.

Under autocast a CUDA build copies the weights, as float16 whatever autocast's type is, into one flat buffer, and casts
the input and the states (aten/src/ATen/cudnn/AutocastRNN.cpp); on the way it asks the card's driver for cuDNN's layout.
A CPU build has nothing there. So that is done here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.patching import PatchStack
from vramfit.torch_internals.dispatch import VF, DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.layers import rnn_impls
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_cuda.backends import RNNMode

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCUDA)

_CAST = frozenset((torch.float32, torch.bfloat16))
"""What autocast makes float16 for cuDNN's layers: neither float64 nor what has it already."""


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Lead stacks of recurrent layers to cuDNN, and lay their weights out as it wants them."""
    for layer in RNNMode:
        patches.set(VF, layer.name, _recurrent(mode, layer, getattr(VF, layer.name)))
    for key, name in (("RNN_TANH", "rnn_tanh"), ("RNN_RELU", "rnn_relu")):
        patches.item(rnn_impls, key, getattr(VF, name))
    _patch_flatten(mode, patches)


def _recurrent(mode: OpRunner, kind: RNNMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """A stack of layers through ``aten._cudnn_rnn`` where a card would do that. See NOTE [Recurrent layers]."""

    def layer(*args: Any) -> Any:
        data = args[0]
        if type(data) is not FakeTensor or data.device.type != "cuda" or not torch.backends.cudnn.enabled:
            return original(*args)
        batch_first, sizes = False, []
        if isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple)):  # a packed sequence
            _, batch_sizes, hidden, weights, biases, layers, dropout, train, bidirectional = args
            sizes = [int(size) for size in batch_sizes.tolist()]
        else:
            _, hidden, weights, biases, layers, dropout, train, bidirectional, batch_first = args
        hx, cx = hidden if kind is RNNMode.lstm else (hidden, None)
        hidden_size = hx.shape[2] if cx is None else cx.shape[2]
        projection = 0 if hx.shape[2] == hidden_size else hx.shape[2]
        weight_buffer = _shared_buffer(weights)
        # Before the states are made contiguous, which may take memory too.
        dropout_state = (
            mode.workspaces.dropout_state(data.device.index or 0) if dropout > 0 and train else None
        )
        hx, cx = hx.contiguous(), None if cx is None else cx.contiguous()
        autocast = torch.is_autocast_enabled("cuda")  # the guard turns it off
        with ExcludeDispatchKeyGuard(_AUTOCAST):
            if autocast:
                if weights[0].dtype in _CAST:
                    weight_buffer, weights = _half_weights(weights)
                cx = None if cx is None else _half(cx)
                hx, data = _half(hx), _half(data)
            output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
                data,
                list(weights),
                (4 if biases else 2) + (1 if projection else 0),
                weight_buffer,
                hx,
                cx,
                int(kind),
                hidden_size,
                projection,
                layers,
                batch_first,
                float(dropout),
                train,
                bidirectional,
                sizes,
                dropout_state,
            )
        return (output, hy, cy) if kind is RNNMode.lstm else (output, hy)

    return layer


def _half(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float16) if value.dtype in _CAST else value


def _half_weights(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights as float16 in one flat buffer, which autograd follows; the buffer, and its parts."""
    buffer = torch.empty(
        sum(weight.numel() for weight in weights), dtype=torch.float16, device=weights[0].device
    )
    parts, offset = [], 0
    for weight in weights:
        part = buffer[offset : offset + weight.numel()].view(weight.shape).detach()
        offset += weight.numel()
        parts.append(part.copy_(weight))
    return buffer, parts


def _shared_buffer(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat buffer that all weights view, as RNN.cpp (cudnn) ``try_get_weight_buf`` finds it; None if none."""
    first = weights[0].untyped_storage()
    if any(w.untyped_storage()._cdata != first._cdata for w in weights):
        return None
    with torch.no_grad():
        flat = weights[0].detach()
        return flat.as_strided((first.nbytes() // flat.element_size(),), (1,), 0)


def _patch_flatten(mode: OpRunner, patches: PatchStack) -> None:
    """``flatten_parameters`` moves all weights of a layer stack into one buffer of the card."""

    def flatten(self: nn.RNNBase) -> None:
        weights = [w for w in self._flat_weights if isinstance(w, torch.Tensor)]
        if (
            not weights
            or len(weights) != len(self._flat_weights)
            or any(type(w) is not FakeTensor or w.device.type != "cuda" for w in weights)
            or len({w.dtype for w in weights}) > 1
            or not torch.backends.cudnn.enabled
            or len({w.untyped_storage()._cdata for w in weights}) == 1 != len(weights)
        ):
            return
        with torch.no_grad():
            buffer = torch.empty(
                sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device
            )
            mode.meter.tag(buffer, Category.PARAMETERS, mode.meter.modules.path_of(self))
            offset = 0
            for weight in weights:
                piece = buffer[offset : offset + weight.numel()].view(weight.shape)
                offset += weight.numel()
                piece.copy_(weight.detach())  # small weights keep their true values
                weight.data = piece

    patches.set(nn.RNNBase, "flatten_parameters", flatten)
