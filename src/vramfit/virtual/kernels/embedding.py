"""Embedding backward: sorting the indices, and summing the rows that share one.

aten/src/ATen/native/cuda/Embedding.cu (``embedding_dense_backward_cuda``) and EmbeddingBackwardKernel.cu
(``embedding_backward_cuda_kernel``). Up to 3072 indices are handled without sorting.
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
    ceil_div,
    nbytes,
    round_up,
    table,
)
from vramfit.virtual.kernels.cub import sort_bytes, sort_error

_UNSORTED = 3072
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_BLOCK = 1024  # MAX_BLOCK_SIZE
_BLOCKS_PER_SM = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM


def _dense_backward(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)``.

    The gradient table is allocated after the indices are sorted, and before they are split into segments.
    """
    del outputs
    grad, indices = args[:2]
    weights = argument(args, kwargs, 2, "num_weights")
    by_frequency = argument(args, kwargs, 4, "scale_grad_by_freq")
    count, index, width = indices.numel(), indices.element_size(), grad.shape[-1]
    before = [
        0 if indices.is_contiguous() else nbytes(indices),
        0 if grad.is_contiguous() else nbytes(grad),
    ]
    if not count or (count <= _UNSORTED and not by_frequency):
        kept = tuple(size for size in before if size)
        return Extras(before=kept) if kept else None
    size = count * index
    before += [size, size, size if by_frequency else 0]
    sorting = size + sort_bytes(count, index, index, ctx)  # a range of positions, and CUB's storage
    summing = _segments(count, index, width, weights, grad.element_size(), ctx)
    after = summing if sum(summing) >= sorting else [sorting]
    error = sort_error(count, ctx) if after is not summing else 8192
    return Extras(tuple(s for s in before if s), tuple(s for s in after if s), error_bytes=error)


def _segments(
    count: int, index: int, width: int, weights: int, element: int, ctx: KernelContext
) -> list[int]:
    """Buffers of ``embedding_backward_cuda_kernel``: bounds of segments of equal indices, and their partial
    sums."""
    segments = min(count, weights)
    partials = count // _ROWS_PER_THREAD + segments
    accumulator = max(4, element)
    sizes = [
        count * index,  # where segments start
        8,
        segments * index,  # parts of each
        segments * index,  # their running sum
        8,
        partials * index,  # where parts start
    ]
    stride = round_up(width, 32)
    block = min(stride, _BLOCK)
    grid = ceil_div(segments * stride, block)
    fused = grid < ctx.spec.sm_count * _BLOCKS_PER_SM and partials > grid * 4 and not ctx.deterministic
    if fused:  # few long segments: atomic sums, in float32 for halves
        sizes += [partials * index, weights * width * accumulator if accumulator != element else 0]
    else:
        sizes.append(partials * width * accumulator)
    return sizes


def _bag(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``_embedding_bag`` backward (EmbeddingBag.cu, ``_embedding_bag_dense_backward_cuda``): sorted as
    above."""
    del outputs
    grad, indices = args[:2]
    mode = argument(args, kwargs, 7, "mode", 0)
    if mode == 2 or not indices.numel():  # max: a kernel with atomics
        return None
    weights = argument(args, kwargs, 5, "num_weights")
    count, index = indices.numel(), indices.element_size()
    sizes = _segments(count, index, grad.shape[-1], weights, grad.element_size(), ctx)
    return Extras(
        (count * index, count * index), tuple(s for s in sizes if s), error_bytes=sort_error(count, ctx)
    )


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        "embedding_dense_backward": _dense_backward,
        "_embedding_bag_dense_backward": _bag,
    }
)
