"""Interpolation, pooling, padding, rolling, distances: dense stand-ins for strided tensors, and a few buffers.

aten/src/ATen/native/cuda/UpSampleNearest2d.cu, UpSampleNearest3d.cu, UpSampleBilinear2d.cu, DilatedMaxPool2d.cu,
AveragePool2d.cu, AdaptiveAveragePooling.cu, ReflectionPad.cu, ReplicationPadding.cu, TensorTransformations.cu and
native/TensorTransformations.h (``roll_common``), DistanceKernel.cu. Grid sampling, bicubic and trilinear
interpolation, constant padding, flipping and ``cat`` read any strides and keep nothing.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    after_outputs,
    before_outputs,
    nbytes,
    table,
)
from vramfit.virtual.op_call import OpCall

_CHANNELS_LAST = torch.channels_last
_NEAREST_CHANNELS = 4  # upsample_nearest2d_out_cuda_template: so many channels have a channels_last kernel


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=_CHANNELS_LAST)
    )


@after_outputs
def _nearest(call: OpCall, scratch: Scratch) -> None:
    """Nearest neighbours, forward and backward: a kernel for channels_last, else contiguous forms of both."""
    source = call.args[0]
    if not isinstance(call.out, torch.Tensor) or not source.numel():
        return
    if _is_channels_last(source) and source.shape[1] >= _NEAREST_CHANNELS and _is_channels_last(call.out):
        return
    scratch.copy(source)
    scratch.copy(call.out)


@after_outputs
def _dense_2d(call: OpCall, scratch: Scratch) -> None:
    """Planes that the kernel reads contiguously or in channels_last, in whichever order the input lies."""
    source = call.args[0]
    if source.is_contiguous() or _is_channels_last(source):
        return
    scratch.take(nbytes(source))


@after_outputs
def _dense_2d_backward(call: OpCall, scratch: Scratch) -> None:
    """A gradient brought to the memory format of the input that follows it."""
    grad, source = call.args[:2]
    wanted = _is_channels_last if _is_channels_last(source) else torch.Tensor.is_contiguous
    scratch.take(0 if wanted(grad) else nbytes(grad))


@after_outputs
def _contiguous(call: OpCall, scratch: Scratch) -> None:
    """A contiguous copy of a strided first argument."""
    scratch.copy(call.args[0])


@before_outputs
def _roll(call: OpCall, scratch: Scratch) -> None:
    """``roll``: one dimension after the other; what was rolled before lives until the last is done."""
    source = call.args[0]
    dims = call.argument(2, "dims", ())
    count = 1 if isinstance(dims, int) else len(dims)
    scratch.copy(source)
    for _ in range(count - 1):
        scratch.take(nbytes(source))


@after_outputs
def _cdist_backward(call: OpCall, scratch: Scratch) -> None:
    """``_cdist_backward``: the gradient from every pair of rows, before it is summed (DistanceKernel.cu,
    ``cdist_backward_kernel_impl``)."""
    first, second = call.args[1], call.args[2]
    if not call.out.numel() or not second.numel():
        return
    for tensor in (first, second, call.args[0]):
        scratch.copy(tensor)
    scratch.take(nbytes(call.out) * second.shape[-2])


@after_outputs
def _pdist_backward(call: OpCall, scratch: Scratch) -> None:
    """``_pdist_backward``: the same for pairs within one matrix (``pdist_backward_kernel_impl``)."""
    source = call.args[1]
    if source.shape[0] < 2:
        return
    scratch.take((source.shape[0] - 1) * nbytes(source))


RULES: dict[OpOverload, Rule] = table(
    {
        (
            *("upsample_nearest2d", "_upsample_nearest_exact2d"),
            *("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward"),
        ): _nearest,
        (
            *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_nearest3d_backward"),
            *("_upsample_nearest_exact3d_backward", "upsample_nearest1d", "upsample_nearest1d_backward"),
            *("reflection_pad1d", "reflection_pad2d", "reflection_pad2d_backward"),
            *("reflection_pad3d", "reflection_pad3d_backward", "replication_pad1d_backward"),
            *("replication_pad2d_backward", "replication_pad3d_backward"),
            *("avg_pool3d", "avg_pool3d_backward", "max_pool3d_with_indices", "_adaptive_avg_pool3d"),
            *("_adaptive_avg_pool3d_backward", "adaptive_max_pool3d", "max_pool3d_with_indices_backward"),
        ): _contiguous,
        ("upsample_bilinear2d_backward", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"): (
            _dense_2d
        ),
        (
            *("max_pool2d_with_indices_backward", "avg_pool2d_backward"),
            "_adaptive_avg_pool2d_backward",
        ): _dense_2d_backward,
        "roll": _roll,
        "_cdist_backward": _cdist_backward,
        "_pdist_backward": _pdist_backward,
    }
)
