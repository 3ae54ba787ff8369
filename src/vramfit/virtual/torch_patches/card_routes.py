"""Functions that take another way on a CPU build, or with tensor subclasses, than on a card: here they take the card's.

A kernel registered for CUDA's dispatch keys wins over a composite one, which a CPU build takes apart before Python sees
it. On a CUDA build those kernels exist already and are left alone, except for attention, whose choice of backend asks
the card.

NOTE [Recurrent layers]
``torch._VF.lstm`` and its relatives decide in C++ whether cuDNN runs, and call it through a table that only CUDA builds
fill (aten/src/ATen/native/RNN.cpp, ``lstm_cudnn_stub``); a CPU build takes them apart into hundreds of small ops. So
the decision is made here, and leads to ``aten._cudnn_rnn``, which autograd knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.compiled_through import standing_in
from vramfit.patching import PatchStack
from vramfit.torch_internals import dispatch
from vramfit.torch_internals.dispatch import VF, has_kernel
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.layers import rnn_impls
from vramfit.trace import Category
from vramfit.virtual.kernels import sdpa
from vramfit.virtual.kernels.sdpa_refusals import math_fallback
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_cuda.backends import RNNMode

# Ops with a CUDA kernel that CPU builds decompose; the placeholder is never run: our mode takes them before.
_WHOLE_ON_CARD = (
    "silu_backward",
    "mish_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Lead attention, losses, ``one_hot`` and recurrent layers the way of a card."""
    _register_kernels(mode, patches)
    _answer_for_attention(mode, patches)
    _patch_ctc_loss(patches)
    _patch_one_hot(patches)
    for layer in RNNMode:
        patches.set(VF, layer.name, _recurrent(mode, layer, getattr(VF, layer.name)))
    for key, name in (("RNN_TANH", "rnn_tanh"), ("RNN_RELU", "rnn_relu")):
        patches.item(rnn_impls, key, getattr(VF, name))
    _patch_flatten(mode, patches)


_QUESTIONS = {
    "_can_use_flash_attention": sdpa.SdpaBackend.FLASH,
    "_can_use_mem_efficient_attention": sdpa.SdpaBackend.EFFICIENT,
    "_can_use_cudnn_attention": sdpa.SdpaBackend.CUDNN,
}
"""What ``torch.backends.cuda`` asks about a call of attention, in C++: of the real card, and False without one."""


def _answer_for_attention(mode: OpRunner, patches: PatchStack) -> None:
    def answer(backend: sdpa.SdpaBackend) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            context = mode.workspaces.context(params.query.device.index or 0)
            return sdpa.can_use(
                backend,
                params.query,
                params.key,
                params.value,
                params.attn_mask,
                params.dropout,
                params.is_causal,
                params.enable_gqa,
                context,
            )

        return can_use

    for name, backend in _QUESTIONS.items():
        patches.set(torch._C, name, answer(backend))


def _register_kernels(mode: OpRunner, patches: PatchStack) -> None:
    """Register the CUDA kernels that this build lacks."""
    library = torch.library.Library("aten", "IMPL")
    patches.call(library._destroy)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        context = mode.workspaces.context(query.device.index or 0)

        def fell_back() -> None:
            at = mode.guesses.location()
            mode.machine.note_attention(
                math_fallback(query, key, value, attn_mask, enable_gqa, is_causal, at, context)
            )

        return sdpa.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, context, fell_back
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding a kernel on purpose
        for dispatch_key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, dispatch_key)
        for name in _WHOLE_ON_CARD:
            if not has_kernel(f"aten::{name}", "CUDA"):
                library.impl(name, _unreachable(name), "CUDA")


def _unreachable(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name} reached a kernel on the virtual GPU")

    return kernel


def _patch_ctc_loss(patches: PatchStack) -> None:
    """Give lengths as lists, which is what LossCTC.cpp turns them into when no subclass is among the arguments."""
    original = torch.ctc_loss

    def ctc_loss(
        log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, *args: Any, **kw: Any
    ) -> Any:
        if type(log_probs) is FakeTensor:
            inputs, lengths = (
                value.tolist() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
                for value in (inputs, lengths)
            )
        return original(log_probs, targets, inputs, lengths, *args, **kw)

    patches.set(torch, "ctc_loss", standing_in(original, ctc_loss))


def _patch_one_hot(patches: PatchStack) -> None:
    """Make zeros, then scatter: tensor subclasses are given another form (ATen/native/Onehot.cpp)."""
    original = torch.nn.functional.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        # Empty tensors and wrong types are left to torch, with its errors.
        known = type(tensor) is FakeTensor and tensor.dtype is torch.int64 and tensor.numel() > 0
        if not known or tensor.device.type != "cuda":
            return original(tensor, num_classes)
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        if num_classes < 1:
            return original(tensor, num_classes)
        out = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
        return out.scatter_(-1, tensor.unsqueeze(-1), 1)

    replaced = standing_in(original, one_hot)
    patches.set(torch.nn.functional, "one_hot", replaced)
    patches.set(dispatch.nn_functions, "one_hot", replaced)


# -- Recurrent layers ------------------------------------------------------------------------------------------


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
        output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
            data,
            list(weights),
            (4 if biases else 2) + (1 if projection else 0),
            weight_buffer,
            hx.contiguous(),
            None if cx is None else cx.contiguous(),
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
