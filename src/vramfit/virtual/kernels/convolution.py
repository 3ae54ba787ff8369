"""Convolutions: workspaces that cuDNN's heuristics ask for. Estimates, each with its error bar.

aten/src/ATen/native/cudnn/Conv_v8.cpp (``run_conv_plan``) allocates what the chosen engine names, after the
output. Before it come the copies that bring operands to one layout (ConvShared.cpp). The engine is cuDNN's
choice; what decides its appetite is the layout. Tensor-core engines work on channels-last data:

* channels-last tensors: no copies; a few hundred bytes up to one set of filters;
* NCHW tensors in half precision, or float32 with TF32 on capability 8.0 and up: the data is transposed into
  the workspace (input, filters and output, the ``nchwToNhwc`` kernels of any profile);
* float32 otherwise: precomputed indices and filters, as recorded on a card of capability 7.5: the bytes of
  the filters plus at most 1,680 (82,880, 51,328, 205,056 bytes for filters of 81,920, 51,200 and 204,800).

Benchmark mode tries every engine once with the largest workspace among them, and keeps the fastest.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.kernels.context import (
    Args,
    Extras,
    KernelContext,
    Kwargs,
    Rule,
    argument,
    nbytes,
    table,
    temporaries,
)

_HALVES = (torch.float16, torch.bfloat16)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=memory_format)


def uses_tensor_cores(dtype: torch.dtype, ctx: KernelContext) -> bool:
    """Whether cuDNN runs a convolution of this type on tensor cores.

    ``torch.backends.cudnn.allow_tf32`` is on by default, apart from the matrix products' switch.
    """
    if dtype in _HALVES:
        return ctx.sm >= 70
    return dtype is torch.float32 and ctx.sm >= 80


def workspace_estimate(
    source: torch.Tensor, weight: torch.Tensor, out_bytes: int, groups: int, ctx: KernelContext
) -> tuple[int, int]:
    """Bytes of a convolution's workspace, and how far that may be off.

    Args:
        source: input (or the gradient that stands in for it).
        weight: filters.
        out_bytes: size of the result.
        groups: 1 for a full convolution; depthwise kernels need nothing.
        ctx: the card.
    """
    filters = nbytes(weight)
    if groups > 1 and weight.shape[1] == 1:
        return 0, filters
    if _is_channels_last(source) or _is_channels_last(weight):
        return 0, filters
    if uses_tensor_cores(source.dtype, ctx):
        whole = nbytes(source) + filters + out_bytes
        return whole, whole
    return filters + 256, filters + 4096


def _uses_cudnn(source: torch.Tensor, ctx: KernelContext) -> bool:
    return ctx.cudnn_enabled and source.dtype in (*_HALVES, torch.float32, torch.float64)


def _layout_copies(*tensors: torch.Tensor) -> list[int]:
    """Copies that bring tensors to one layout: channels-last if any of them is
    (``cudnn_conv_suggest_memory_format``)."""
    if any(_is_channels_last(tensor) for tensor in tensors):
        return [0 if _is_channels_last(tensor) else nbytes(tensor) for tensor in tensors]
    return [0 if tensor.is_contiguous() else nbytes(tensor) for tensor in tensors]


def _forward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    source, weight = args[:2]
    if not source.numel() or not weight.numel():
        return None
    groups = argument(args, kwargs, 8, "groups", 1)
    if not _uses_cudnn(source, ctx):  # im2col, one image at a time (ConvolutionMM2d.cu)
        pixels = outputs.numel() // (outputs.shape[0] * outputs.shape[1])
        columns = weight.numel() // weight.shape[0] * pixels * source.element_size()
        return temporaries(0 if source.is_contiguous() else nbytes(source), columns)
    size, error = workspace_estimate(source, weight, nbytes(outputs), groups, ctx)
    if ctx.cudnn_benchmark:
        error += nbytes(source) + nbytes(outputs) + nbytes(weight)
    return temporaries(*_layout_copies(source, weight), size, error_bytes=error)


def _backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``convolution_backward(grad, input, weight, ..., groups, output_mask)``: one workspace after the
    other."""
    grad, source, weight = args[:3]
    if not source.numel() or not weight.numel() or not _uses_cudnn(source, ctx):
        return None
    groups = argument(args, kwargs, 9, "groups", 1)
    size = error = 0
    if outputs[0] is not None:
        size, error = workspace_estimate(grad, weight, nbytes(source), groups, ctx)
    if outputs[1] is not None:
        by_weight, its_error = workspace_estimate(source, weight, nbytes(grad), groups, ctx)
        size, error = max(size, by_weight), max(error, its_error)
    if ctx.cudnn_benchmark:
        error += nbytes(source) + nbytes(grad) + nbytes(weight)
    return temporaries(*_layout_copies(grad, source, weight), size, error_bytes=error)


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        ("convolution", "_convolution", "cudnn_convolution"): _forward,
        "convolution_backward": _backward,
    }
)
