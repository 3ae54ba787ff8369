"""Normalisation: copies of strided inputs, partial sums of parameter gradients, per-group statistics.

aten/src/ATen/native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh,
native/cudnn/BatchNorm.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.rules import Rule, ceil_div, dense_copy, table, temporaries, workspace
from vramfit.virtual.op_call import Extras, KernelContext, OpCall


def _accumulator(tensor: torch.Tensor) -> int:
    return max(4, tensor.element_size())


# -- layer norm and RMS norm --------------------------------------------------------------------------------


def _layer_norm(call: OpCall) -> Extras | None:
    """``layer_norm_cuda``: works on contiguous input and parameters."""
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    return workspace(dense_copy(call.args[0]), dense_copy(weight), dense_copy(bias))


def _rms_norm(call: OpCall) -> Extras | None:
    """``_fused_rms_norm_cuda`` copies what is not dense, as layer norm does."""
    return workspace(dense_copy(call.args[0]), dense_copy(call.argument(2, "weight")))


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


def _layer_norm_backward(call: OpCall) -> Extras | None:
    """``layer_norm_backward_cuda``: contiguous gradient and input, and partial sums for tall inputs.

    The gradient is copied once the results are there, as recordings show.
    """
    grad, source, normalized, weight = call.args[0], call.args[1], call.args[2], call.args[5]
    wanted = sum(result is not None for result in call.out[1:3])
    before = tuple(s for s in (dense_copy(source), dense_copy(weight)) if s)
    partials = _parameter_partials(source, normalized, wanted, call.context)
    after = tuple(s for s in (dense_copy(grad), *partials) if s)
    return Extras(before, after) if before or after else None


def _rms_norm_backward(call: OpCall) -> Extras | None:
    """``_fused_rms_norm_backward_cuda(grad, input, normalized_shape, rstd, weight, mask)``."""
    grad, source, normalized, weight = call.args[0], call.args[1], call.args[2], call.args[4]
    wanted = 1 if call.out[1] is not None else 0
    before = tuple(s for s in (dense_copy(source), dense_copy(weight)) if s)
    partials = _parameter_partials(source, normalized, wanted, call.context)
    after = tuple(s for s in (dense_copy(grad), *partials) if s)
    return Extras(before, after) if before or after else None


# -- group norm ---------------------------------------------------------------------------------------------


def _group_norm(call: OpCall) -> Extras | None:
    """``GroupNormKernelImplInternal``: fused scale and shift of every channel, two of N x C accumulators."""
    source, weight, bias, batch, channels, pixels = call.args[:6]
    if pixels == 1 or (weight is None and bias is None):
        return None
    size = batch * channels * _accumulator(source)
    return temporaries(size, size)


def _group_norm_backward(call: OpCall) -> Extras | None:
    """``GroupNormBackwardKernelImplInternal``: sums per channel, and the coefficients of the input's
    gradient."""
    source, weight, batch, channels, pixels, groups = call.args[1], *call.args[4:9]
    element = _accumulator(source)
    per_channel, per_group = batch * channels * element, batch * groups * element
    sizes = [per_channel, per_channel]
    coefficients = []
    if call.out[0] is not None:
        coefficients = [per_group, per_group, per_channel if weight is not None and pixels > 1 else 0]
    return temporaries(*sizes, *coefficients)


# -- batch norm ---------------------------------------------------------------------------------------------


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether kernels for channels-last data take it: rows of channels too (``batch_norm_choose_impl``)."""
    if tensor.is_contiguous():
        return tensor.stride(1) == 1
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _channels_last_backward(tensor: torch.Tensor) -> bool:
    """The same of gradients, and three dimensions (``batch_norm_use_channels_last_kernels``)."""
    if tensor.dim() == 5 and not tensor.is_contiguous():
        return tensor.is_contiguous(memory_format=torch.channels_last_3d)
    return _channels_last(tensor)


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


def _native_batch_norm(call: OpCall) -> Extras | None:
    """``batch_norm_cuda``: channels-last statistics over several blocks (``batch_norm_stats_channels_last``), and
    those of any other strides by ``var_mean``."""
    source = call.args[0]
    if not call.argument(5, "training", False):
        return None
    return _statistics(source, call.context)


def _statistics(source: torch.Tensor, ctx: KernelContext) -> Extras | None:
    if _channels_last(source):
        return temporaries(*_staging(source, 4))
    if source.is_contiguous():
        return None
    welford = 32 if source.element_size() == 8 else 16
    return reduce_extras(source, [d for d in range(source.dim()) if d != 1], welford, ctx, vector=2)


def _batch_norm_stats(call: OpCall) -> Extras | None:
    """``batch_norm_stats`` and ``batch_norm_update_stats``, of synchronised batch norm."""
    return _statistics(call.args[0], call.context)


def _native_batch_norm_backward(call: OpCall) -> Extras | None:
    """``batch_norm_backward_cuda``: channels-last reductions stage two sums a channel, and keep both.

    Where only one of gradient and input is channels-last, both are made dense (``reshape`` to three dimensions).
    """
    grad, source = call.args[0], call.args[1]
    if not _channels_last_backward(source):
        return workspace(dense_copy(grad))
    sums = source.shape[1] * 4
    if not _channels_last_backward(grad):
        return Extras(
            before=tuple(s for s in (dense_copy(grad), dense_copy(source)) if s), after=(sums, sums)
        )
    return temporaries(sums, sums, *_staging(source, 2))


def _batch_norm_backward_reduce(call: OpCall) -> Extras | None:
    """``batch_norm_backward_reduce``: the sums are its results."""
    grad, source = call.args[:2]
    if _channels_last_backward(grad) and _channels_last_backward(source):
        return temporaries(*_staging(source, 2))
    return workspace(dense_copy(grad), dense_copy(source))


def _cudnn_batch_norm_error(call: OpCall) -> Extras | None:
    """cuDNN names its own workspace and reserve (``cudnnGetBatchNormalization*Size``).

    None for contiguous data, as recorded (``eor-nn``). Training on channels-last data takes the persistent kernels
    (``getCudnnBatchNormMode``), which sum over blocks: two floats a channel for each of at most 512 blocks.
    """
    source = call.args[0]
    if source.is_contiguous():
        return None
    return Extras(error_bytes=source.shape[1] * 8 * 512)


RULES: dict[OpOverload, Rule] = table(
    {
        "native_layer_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_backward,
        "_fused_rms_norm": _rms_norm,
        "_fused_rms_norm_backward": _rms_norm_backward,
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_backward,
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"): _native_batch_norm,
        ("native_batch_norm_backward", "batch_norm_backward"): _native_batch_norm_backward,
        ("batch_norm_stats", "batch_norm_update_stats"): _batch_norm_stats,
        "batch_norm_backward_reduce": _batch_norm_backward_reduce,
        ("cudnn_batch_norm", "cudnn_batch_norm_backward"): _cudnn_batch_norm_error,
    }
)
