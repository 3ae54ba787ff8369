"""Recurrent layers: a card runs them in cuDNN; a CPU build would take them apart into hundreds of small ops.

``torch._VF.lstm`` and its relatives decide in C++ whether cuDNN runs, and call it through a table that only CUDA
builds fill (aten/src/ATen/native/RNN.cpp, ``lstm_cudnn_stub``). So the decision is made here, and leads to
``aten._cudnn_rnn``, which autograd knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import rnn as rnn_module

from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner

# cudnnRNNMode_t, in the order of torch.backends.cudnn.rnn.get_cudnn_mode
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Route recurrent layers on virtual cards to cuDNN's op."""
    for name in MODES:
        patches.set(torch._VF, name, _layer(mode, name, getattr(torch._VF, name)))
    implementations = rnn_module._rnn_impls
    for key, name in (("RNN_TANH", "rnn_tanh"), ("RNN_RELU", "rnn_relu")):
        patches.item(implementations, key, getattr(torch._VF, name))
    _patch_flatten(mode, patches)


def _layer(mode: OpRunner, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def layer(*args: Any) -> Any:
        if (
            type(args[0]) is not FakeTensor
            or args[0].device.type != "cuda"
            or not torch.backends.cudnn.enabled
        ):
            return original(*args)
        packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))
        if packed:  # data, batch_sizes, hx, params, has_biases, layers, dropout, train, bidirectional
            data, batch_sizes, hidden, weights, biases, layers, dropout, train, bidirectional = args
            batch_first, sizes = False, [int(size) for size in batch_sizes.tolist()]
        else:  # input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first
            data, hidden, weights, biases, layers, dropout, train, bidirectional, batch_first = args
            sizes = []
        return run_cudnn(
            mode,
            name,
            data,
            hidden,
            weights,
            biases,
            layers,
            dropout,
            train,
            bidirectional,
            batch_first,
            sizes,
        )

    return layer


def run_cudnn(
    mode: OpRunner,
    name: str,
    data: torch.Tensor,
    hidden: Any,
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    sizes: list[int],
) -> tuple[torch.Tensor, ...]:
    """One recurrent layer stack through ``aten._cudnn_rnn``; returns output, hidden (and cell) state."""
    hx, cx = hidden if name == "lstm" else (hidden, None)
    hidden_size = cx.shape[2] if cx is not None else hx.shape[2]
    projection = hx.shape[2] if cx is not None and hx.shape[2] != hidden_size else 0
    stride = (4 if biases else 2) + (1 if projection else 0)
    weight_buffer = _shared_buffer(weights)
    dropout_state = mode.workspaces.dropout_state(data.device.index or 0) if dropout > 0 and train else None
    output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
        data,
        list(weights),
        stride,
        weight_buffer,
        hx.contiguous(),
        None if cx is None else cx.contiguous(),
        MODES[name],
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
    return (output, hy, cy) if name == "lstm" else (output, hy)


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
