"""Functions that take another way on a CPU build, or with tensor subclasses, than on a card: here they take the card's.

A kernel registered for CUDA's dispatch keys wins over a composite one, which a CPU build takes apart before Python sees
it. On a CUDA build those kernels exist already and are left alone, except for attention, whose choice of backend asks
the card.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from vramfit.compiled_through import standing_in
from vramfit.patching import PatchStack
from vramfit.torch_internals import dispatch
from vramfit.torch_internals.dispatch import has_kernel
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.kernels import sdpa
from vramfit.virtual.kernels.linear import linear
from vramfit.virtual.kernels.sdpa_refusals import math_fallback
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches import recurrent_routes

# Ops with a CUDA kernel that CPU builds decompose; the placeholder is never run: our mode takes them before.
_WHOLE_ON_CARD = (
    "silu_backward",
    "mish_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Lead attention, linear layers, losses, ``one_hot`` and recurrent layers the way of a card."""
    _register_kernels(mode, patches)
    _answer_for_attention(mode, patches)
    _patch_ctc_loss(patches)
    _patch_one_hot(patches)
    recurrent_routes.install(mode, patches)


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
        library.impl("linear", linear, "AutogradCUDA")
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
