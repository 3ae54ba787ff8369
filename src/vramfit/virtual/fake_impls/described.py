"""Ops with CUDA kernels that torch describes nowhere: what each returns, told from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.capture.ops import Handler
from vramfit.virtual.fake_impls.registry import RULES, find_overload, rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_Describe = Callable[["OpRunner", tuple[Any, ...]], Any]


def _like(position: int) -> _Describe:
    """A tensor like one of the arguments, of its dense strides."""
    return lambda mode, args: mode.fake_like(args[position])


def _contiguous(position: int) -> _Describe:
    return lambda mode, args: mode.fake_empty(
        tuple(args[position].shape), args[position].dtype, args[position].device
    )


def _with_mask(mode: OpRunner, args: tuple[Any, ...]) -> Any:
    """A tensor like the first, and a mask of which of its elements were not clamped (cuda/FakeQuantizeCore.cu)."""
    source: torch.Tensor = args[0]
    mask = torch.empty_like(
        torch.empty_strided(source.shape, source.stride(), device="meta"), dtype=torch.bool
    )
    return mode.fake_like(source), mode.describer.factory.make(mask, source.device)


def _learnable_backward(mode: OpRunner, args: tuple[Any, ...]) -> Any:
    """Gradients of the tensor, of its scale and of its zero point (native/quantized/FakeQuantPer*Affine.cpp)."""
    return tuple(mode.fake_like(args[position]) for position in (1, 2, 3))


_OPS: dict[str, _Describe] = {
    "_logcumsumexp.default": _contiguous(0),  # cuda/LogcumsumexpKernel.cu, result like the input
    "_masked_softmax.default": _contiguous(0),  # cuda/SoftMax.cu, masked_softmax_cuda
    "_masked_softmax_backward.default": _contiguous(0),
    "_sample_dirichlet.default": _like(0),  # cuda/Distributions.cpp
    "_dirichlet_grad.default": _like(0),
    "_standard_gamma.default": _like(0),
    "_standard_gamma_grad.default": _like(0),
    "binomial.default": _like(0),
    "fake_quantize_per_tensor_affine_cachemask.default": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _with_mask,
    "fake_quantize_per_channel_affine_cachemask.default": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine.default": _like(0),
    "_fake_quantize_learnable_per_channel_affine.default": _like(0),
    "_fake_quantize_learnable_per_tensor_affine_backward.default": _learnable_backward,
    "_fake_quantize_learnable_per_channel_affine_backward.default": _learnable_backward,
}


@rule("aten._is_all_true.default")
def is_all_true(mode: OpRunner, call: OpCall) -> Any:
    """What ``torch.distributions`` asks of its arguments: yes, unless their true values say otherwise."""
    out = mode.fake_empty((), torch.bool, call.args[0].device)
    mode.settle(call, out)
    shadow = mode.shadows.find(out)
    if shadow is None or shadow.guessed:
        mode.shadows.set(out, torch.tensor(True, device="cpu"), guessed=True)
    return out


def _handler(describe: _Describe) -> Handler:
    def handler(mode: OpRunner, call: OpCall) -> Any:
        out = describe(mode, call.args)
        mode.settle(call, out)
        return out

    return handler


def _register() -> None:
    for name, describe in _OPS.items():
        func = find_overload(f"aten.{name}")
        if func is not None:
            RULES.setdefault(func, _handler(describe))


_register()
