"""Normalisation: copies of strided inputs, partial sums of parameter gradients, per-group statistics.

aten/src/ATen/native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh,
native/cudnn/BatchNorm.cpp.
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
    ceil_div,
    nbytes,
    table,
    temporaries,
)


def _dense_copy(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_contiguous() else nbytes(tensor)


def _before(*sizes: int) -> Extras | None:
    kept = tuple(size for size in sizes if size)
    return Extras(before=kept) if kept else None


def _accumulator(tensor: torch.Tensor) -> int:
    return max(4, tensor.element_size())


# -- layer norm and RMS norm --------------------------------------------------------------------------------


def _layer_norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``layer_norm_cuda``: works on contiguous input and parameters."""
    del outputs, ctx
    weight, bias = argument(args, kwargs, 2, "weight"), argument(args, kwargs, 3, "bias")
    return _before(_dense_copy(args[0]), _dense_copy(weight), _dense_copy(bias))


def _rms_norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``_fused_rms_norm_cuda``: likewise."""
    del outputs, ctx
    return _before(_dense_copy(args[0]), _dense_copy(argument(args, kwargs, 2, "weight")))


def partial_rows(rows: int, width: int, sm_count: int) -> int:
    """Partial sums of parameter gradients for tall narrow inputs, 0 where one pass does.

    ``LaunchGammaBetaBackwardCUDAKernel``: above 65,536 rows, and columns that fill less than half of the SMs
    in blocks of 32, the rows are split into blocks of 32, at most 32,768 blocks in all.
    """
    columns = ceil_div(width, 32)
    if rows <= 64 * 1024 or width // 32 >= sm_count // 2:
        return 0
    return min(32 * 1024 // columns, ceil_div(rows, 32))


def _parameter_partials(source: torch.Tensor, normalized: Any, count: int, ctx: KernelContext) -> list[int]:
    width = math.prod(normalized)
    rows = source.numel() // width if width else 0
    partials = partial_rows(rows, width, ctx.spec.sm_count)
    # The sum over the partials makes a new tensor of a row, which replaces the gradient allocated first.
    return [partials * width * source.element_size()] * count + [width * source.element_size()] * (
        count if partials else 0
    )


def _layer_norm_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``layer_norm_backward_cuda``: contiguous gradient and input, and partial sums for tall inputs."""
    del kwargs
    grad, source, normalized, weight = args[0], args[1], args[2], args[5]
    wanted = sum(result is not None for result in outputs[1:3])
    copies = tuple(s for s in (_dense_copy(source), _dense_copy(weight), _dense_copy(grad)) if s)
    partials = tuple(s for s in _parameter_partials(source, normalized, wanted, ctx) if s)
    return Extras(copies, partials) if copies or partials else None


def _rms_norm_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``_fused_rms_norm_backward_cuda(grad, input, normalized_shape, rstd, weight, mask)``: likewise."""
    del kwargs
    grad, source, normalized, weight = args[0], args[1], args[2], args[4]
    wanted = 1 if outputs[1] is not None else 0
    copies = tuple(s for s in (_dense_copy(source), _dense_copy(weight), _dense_copy(grad)) if s)
    partials = tuple(s for s in _parameter_partials(source, normalized, wanted, ctx) if s)
    return Extras(copies, partials) if copies or partials else None


# -- group norm ---------------------------------------------------------------------------------------------


def _group_norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``GroupNormKernelImplInternal``: fused scale and shift of every channel, two of N x C accumulators."""
    del kwargs, outputs, ctx
    source, weight, bias, batch, channels, pixels = args[:6]
    if pixels == 1 or (weight is None and bias is None):
        return None
    size = batch * channels * _accumulator(source)
    return temporaries(size, size)


def _group_norm_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``GroupNormBackwardKernelImplInternal``: sums per channel, and the coefficients of the input's
    gradient."""
    del kwargs, ctx
    source, weight, batch, channels, pixels, groups = args[1], *args[4:9]
    element = _accumulator(source)
    per_channel, per_group = batch * channels * element, batch * groups * element
    sizes = [per_channel, per_channel]
    coefficients = []
    if outputs[0] is not None:
        coefficients = [per_group, per_group, per_channel if weight is not None and pixels > 1 else 0]
    if _channels_last(source) and pixels > 1:  # sums of rows, gone before the coefficients are made
        rows = per_channel * _closest_factor(pixels) * 2
        return temporaries(*sizes, *([rows] if rows > sum(coefficients) else coefficients))
    return temporaries(*sizes, *coefficients)


def _closest_factor(value: int) -> int:
    """The largest divisor up to the square root (``ClosestFactor``)."""
    factor = math.isqrt(value)
    while value % factor:
        factor -= 1
    return factor


# -- batch norm ---------------------------------------------------------------------------------------------


def _channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=memory_format)


def channels_last_grid(rows: int, channels: int) -> int:
    """Blocks over the rows of a channels-last reduction (Normalization.cuh, ``flexible_launch_configs``)."""

    def last_power(value: int) -> int:
        return 1 << (max(value, 1).bit_length() - 1)

    block_x = min(last_power(channels), 32)
    block_y = min(last_power(ceil_div(rows, 16)), 512 // block_x)
    if block_x * block_y != 512:
        block_x = min(last_power(channels), 512 // block_y)
    grid = min(ceil_div(rows, block_y * 16), 128)
    return grid if grid >= 8 else 1  # few blocks are not worth a second pass


def _staging(source: torch.Tensor, values: int) -> tuple[int, int]:
    """Staging area and counters of a channels-last reduction over several blocks."""
    channels = source.shape[1]
    rows = source.numel() // channels if channels else 0
    grid = channels_last_grid(rows, channels)
    if grid == 1:
        return 0, 0
    block_x = min(1 << (max(channels, 1).bit_length() - 1), 32)
    return values * channels * grid * 4, ceil_div(channels, block_x) * 4


def _native_batch_norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``batch_norm_cuda``: channels-last statistics over several blocks
    (``batch_norm_stats_channels_last``)."""
    del outputs, ctx
    training = argument(args, kwargs, 5, "training", False)
    if not training or not _channels_last(args[0]):
        return None
    return temporaries(*_staging(args[0], 4))


def _native_batch_norm_backward(
    args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext
) -> Extras | None:
    """``batch_norm_backward_cuda``: channels-last reductions stage two sums a channel, and keep both."""
    del kwargs, outputs, ctx
    grad, source = args[0], args[1]
    if not _channels_last(source):
        return _before(_dense_copy(grad))
    sums = source.shape[1] * 4
    return temporaries(sums, sums, *_staging(source, 2))


def _cudnn_batch_norm_error(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """cuDNN names its own workspace (``cudnnGetBatchNormalization*WorkspaceSize``): none seen for NCHW."""
    del kwargs, outputs, ctx
    source = args[0]
    if not _channels_last(source):
        return None
    return Extras(error_bytes=source.shape[1] * 4 * 1024)


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        "native_layer_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_backward,
        "_fused_rms_norm": _rms_norm,
        "_fused_rms_norm_backward": _rms_norm_backward,
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_backward,
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"): _native_batch_norm,
        ("native_batch_norm_backward", "batch_norm_backward"): _native_batch_norm_backward,
        ("cudnn_batch_norm", "cudnn_batch_norm_backward"): _cudnn_batch_norm_error,
    }
)
