"""Reductions: the partial results and counters of those that spread one output over several thread blocks.

aten/src/ATen/native/cuda/Reduce.cuh: ``setReduceConfig`` decides the launch; when it splits an output over
blocks (``ctas_per_output`` > 1), ``gpu_reduce_kernel`` allocates a buffer of partial results and one counter
per block column, after the output.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    table,
    temporaries,
)

_VALUES_PER_THREAD = (16, 256)  # min_values_per_thread, max_values_per_thread


def _last_power(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def _coalesced(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge neighbouring (size, stride) dimensions as TensorIterator does, fastest first."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def global_buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: frozenset[int],
    argument_bytes: int,
    ctx: KernelContext,
    *,
    vector: int = 4,
) -> tuple[int, int]:
    """Bytes of the partial results and of the counters of a reduction; zeros when one block does each output.

    Args:
        shape: of the input.
        strides: of the input, in elements.
        reduced: dimensions that go.
        argument_bytes: size of an accumulator (``arg_t``).
        ctx: the card.
        vector: elements loaded at once along the input (``input_vec_size``).
    """
    inner = _coalesced([(shape[d], strides[d]) for d in reduced if shape[d] > 1])
    kept = [d for d in range(len(shape)) if d not in reduced and shape[d] > 1]
    outer = _coalesced([(shape[d], strides[d]) for d in kept])
    inputs = outputs = 1
    for size, _ in inner:
        inputs *= size
    for size, _ in outer:
        outputs *= size
    along_input = not outer or (bool(inner) and inner[0][1] < outer[0][1])
    step_input = step_output = output_vector = 1
    if along_input:
        width, height = inputs, outputs
        if inner and inner[0][1] == 1 and width >= 128 and len(inner) == 1:
            width //= vector
    else:
        width, height = outputs, inputs
        if outer[0][1] == 1:
            output_vector = _output_vector(outer[0][0], [s for _, s in (*inner, *outer[1:])])
            width //= output_vector
    threads = 512 // output_vector
    width2, height2 = min(_last_power(width), threads), min(_last_power(height), threads)
    block_width = min(width2, 32)
    block_height = min(height2, threads // block_width)
    block_width = min(width2, threads // block_height)
    if along_input:
        step_input *= block_width
    else:
        step_output *= block_width
    least, most = _VALUES_PER_THREAD
    across_warps = ceil_div(inputs, step_input) >= min(block_height * 16, most)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    target = ctx.spec.sm_count * (ctx.spec.max_threads_per_sm // (block_width * block_height))
    grid = ceil_div(outputs // output_vector, step_output)
    per_thread = ceil_div(inputs, step_input)
    if not across_warps or per_thread < most or grid > target:
        return 0, 0
    blocks = max(min(ceil_div(target, grid), ceil_div(per_thread, least)), ceil_div(per_thread, most))
    if blocks <= 1:
        return 0, 0
    buffer = argument_bytes * outputs * blocks
    if not along_input:
        buffer *= block_width * output_vector
    return buffer, 4 * grid


def _output_vector(size: int, other_strides: list[int]) -> int:
    """``get_output_vec_size``: how many neighbouring outputs one load serves."""
    vector = 4
    for value in (size, *other_strides):
        while value % vector:
            vector //= 2
    return vector


def _dims(value: Any, rank: int) -> frozenset[int]:
    if value is None or value == []:
        return frozenset(range(rank))
    if isinstance(value, int):
        value = (value,)
    return frozenset(d % rank if rank else 0 for d in value)


def reduce_extras(
    source: torch.Tensor, dim: Any, argument_bytes: int, ctx: KernelContext, *, vector: int = 4
) -> Extras | None:
    """Extras of reducing a tensor over dimensions (None for all)."""
    count = source.numel()
    if count < 4096 or not source.dim():  # one block's worth: 256 values for each of at least 16 threads
        return None
    buffer, counters = global_buffers(
        source.shape, source.stride(), _dims(dim, source.dim()), argument_bytes, ctx, vector=vector
    )
    return temporaries(buffer, counters)


def _accumulator(source: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of the type that a sum accumulates in: float32 for halves, int64 for integers."""
    dtype = dtype or source.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return max(4, dtype.itemsize)
    return 8


def _sum(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``sum``, ``mean``, ``nansum`` over some dimensions."""
    del outputs
    source = args[0]
    return reduce_extras(
        source, argument(args, kwargs, 1, "dim"), _accumulator(source, kwargs.get("dtype")), ctx
    )


def _sum_all(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    del outputs
    return reduce_extras(args[0], None, _accumulator(args[0], kwargs.get("dtype")), ctx)


def _prod(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    del outputs
    dim = argument(args, kwargs, 1, "dim")
    return reduce_extras(args[0], dim, _accumulator(args[0], kwargs.get("dtype")), ctx)


def _extreme(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``amax``, ``amin``, ``max()``, ``min()``: accumulate in the input's own type
    (ReduceMinValuesKernel.cu)."""
    del outputs
    return reduce_extras(args[0], argument(args, kwargs, 1, "dim"), args[0].element_size(), ctx)


def _with_index(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``argmax``, ``max(dim)``: pairs of a value and an int64 index, 16 bytes (ReduceOps.cu,
    TensorCompare.cu)."""
    del outputs
    return reduce_extras(args[0], argument(args, kwargs, 1, "dim"), 16, ctx)


def _logical(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``any``, ``all``: booleans (ReduceLogicKernel.cu)."""
    del outputs
    return reduce_extras(args[0], argument(args, kwargs, 1, "dim"), 1, ctx)


def _norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``linalg_vector_norm`` (ReduceNormKernel.cu)."""
    del outputs
    return reduce_extras(args[0], argument(args, kwargs, 2, "dim"), max(4, args[0].element_size()), ctx)


def _old_norm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    del outputs
    return reduce_extras(args[0], argument(args, kwargs, 2, "dim"), max(4, args[0].element_size()), ctx)


def _variance(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``var``, ``std``, ``var_mean``: Welford's four numbers (ReduceMomentKernel.cu), two values a load."""
    del outputs
    size = 32 if args[0].element_size() == 8 else 16
    return reduce_extras(args[0], argument(args, kwargs, 1, "dim"), size, ctx, vector=2)


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        ("sum.dim_IntList", "mean.dim", "nansum", "sum.IntList_out", "mean.out"): _sum,
        ("sum", "mean"): _sum_all,
        ("prod", "prod.dim_int"): _prod,
        ("amax", "amin", "max", "min"): _extreme,
        ("argmax", "argmin", "max.dim", "min.dim"): _with_index,
        ("any", "any.dim", "any.dims", "all", "all.dim", "all.dims"): _logical,
        # The whole of `any` and `all`, which anomaly detection asks (TensorCompare.cpp).
        ("_is_any_true", "_is_all_true"): _logical,
        ("linalg_vector_norm", "linalg_vector_norm.out"): _norm,
        ("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar"): _old_norm,
        ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"): _variance,
    }
)
