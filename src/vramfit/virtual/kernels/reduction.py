"""Reductions: the partial results and counters of those that spread one output over several thread blocks.

aten/src/ATen/native/cuda/Reduce.cuh: ``setReduceConfig`` decides the launch; when it splits an output over
blocks (``ctas_per_output`` > 1), ``gpu_reduce_kernel`` allocates a buffer of partial results and one counter
per block column, after the output. Inputs beyond 2 GiB are reduced in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    around_outputs,
    ceil_div,
    is_dense,
    nbytes,
    sequence,
    table,
)
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_VALUES_PER_THREAD = (16, 256)  # min_values_per_thread, max_values_per_thread
_MAX_OFFSET = 2**31 - 1  # bytes and elements that 32-bit indexing reaches


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
        strides: of the input, in elements.
        reduced: dimensions that go.
        argument_bytes: size of an accumulator (``arg_t``).
        vector: elements loaded at once along the input (``input_vec_size``).
    """
    inner = _coalesced([(shape[d], strides[d]) for d in reduced if shape[d] > 1])
    kept = [d for d in range(len(shape)) if d not in reduced and shape[d] > 1]
    outer = _coalesced([(shape[d], strides[d]) for d in kept])
    inputs, outputs = prod(size for size, _ in inner), prod(size for size, _ in outer)
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
    source: torch.Tensor,
    dim: Any,
    argument_bytes: int,
    ctx: KernelContext,
    *,
    vector: int = 4,
    accumulates: bool = True,
) -> Extras | None:
    """Extras of reducing a tensor over dimensions (None for all).

    Args:
        dim: dimensions that go.
        argument_bytes: size of an accumulator.
        vector: elements loaded at once along the input.
        accumulates: whether the outputs can hold accumulators, so that inputs beyond 2 GiB, which are reduced in
            pieces, need no buffer of their own.
    """
    count = source.numel()
    if count < 4096 or not source.dim():  # one block's worth: 256 values for each of at least 16 threads
        return None
    scratch = Scratch()
    _reduce(
        scratch,
        tuple(source.shape),
        source.stride(),
        source.element_size(),
        _dims(dim, source.dim()),
        _Accumulator(argument_bytes, vector, accumulates),
        ctx,
    )
    return sequence(after=scratch)


@dataclass(frozen=True, slots=True)
class _Accumulator:
    """What a reduction keeps: bytes of ``arg_t``, elements loaded at once, and whether outputs can hold it."""

    nbytes: int
    vector: int = 4
    fits_output: bool = True


def _reduce(
    scratch: Scratch,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    element: int,
    reduced: frozenset[int],
    kind: _Accumulator,
    ctx: KernelContext,
) -> None:
    """``gpu_reduce_kernel``: partial results and counters; of each piece where 32-bit offsets do not reach."""
    pieces = _pieces(shape, strides, element)
    if len(pieces) == 1:
        for size in global_buffers(shape, strides, reduced, kind.nbytes, ctx, vector=kind.vector):
            scratch.take(size)
        return
    if not kind.fits_output:  # AccumulationBuffer
        scratch.take(prod(size for axis, size in enumerate(shape) if axis not in reduced) * kind.nbytes)
    for piece in pieces:
        blocks = [
            scratch.take(size)
            for size in global_buffers(piece, strides, reduced, kind.nbytes, ctx, vector=kind.vector)
        ]
        scratch.give(*reversed(blocks))


def _pieces(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> list[tuple[int, ...]]:
    """Shapes that 32-bit offsets reach, halved along the longest dimension until they do.

    TensorIterator.cpp ``can_use_32bit_indexing``, ``get_dim_to_split`` and ``SplitUntil32Bit``.
    """
    extents = [(size - 1) * abs(stride) * element for size, stride in zip(shape, strides, strict=True)]
    if prod(shape) <= _MAX_OFFSET and 1 + sum(extents) <= _MAX_OFFSET:
        return [shape]
    longest = max(range(len(shape)), key=lambda axis: (extents[axis], -axis))
    half = shape[longest] // 2
    first, second = list(shape), list(shape)
    first[longest], second[longest] = half, shape[longest] - half
    return _pieces(tuple(first), strides, element) + _pieces(tuple(second), strides, element)


def reduce_dense(count: int, dtype: torch.dtype, ctx: KernelContext) -> Extras | None:
    """Extras of summing so many numbers of a type that lie densely, or of taking their mean."""
    if count < 4096:
        return None
    scratch = Scratch()
    halves = dtype in _HALVES
    kind = _Accumulator(_accumulator(dtype), 8 if halves else 4, not halves)
    _reduce(scratch, (count,), (1,), dtype.itemsize, frozenset({0}), kind, ctx)
    return sequence(after=scratch)


_HALVES = (torch.float16, torch.bfloat16)


def _converting(
    source: torch.Tensor, dim: Any, wanted: torch.dtype, ctx: KernelContext, accumulator: int
) -> Extras | None:
    """A reduction whose input is converted first, unless halves are summed as float32 on the way.

    ReduceOps.cpp ``make_reduction_from_ty``: a sum of booleans or narrow integers copies them as int64.
    """
    if not source.numel() or not source.dim():
        return None
    scratch = Scratch()
    shape, strides, element = tuple(source.shape), source.stride(), source.element_size()
    lowp = source.dtype in _HALVES and wanted in (torch.float32, source.dtype)
    if source.dtype != wanted and not lowp:
        element = wanted.itemsize
        scratch.take(source.numel() * element)
        if not is_dense(source):
            strides = torch.empty(shape, device="meta").stride()
    if source.numel() >= 4096:
        kind = _Accumulator(
            accumulator, 8 if lowp else 4, source.dtype not in _HALVES or wanted not in _HALVES
        )
        _reduce(scratch, shape, strides, element, _dims(dim, source.dim()), kind, ctx)
    return sequence(after=scratch)


def _accumulator(wanted: torch.dtype) -> int:
    """Bytes of the type that a sum of such results accumulates in: float32 for halves."""
    return max(4, wanted.itemsize) if wanted.is_floating_point or wanted.is_complex else 8


def _sum(call: OpCall) -> Extras | None:
    """``sum``, ``mean``, ``nansum`` over some dimensions."""
    dim = call.argument(1, "dim")
    return _converting(call.args[0], dim, call.out.dtype, call.context, _accumulator(call.out.dtype))


def _sum_all(call: OpCall) -> Extras | None:
    return _converting(call.args[0], None, call.out.dtype, call.context, _accumulator(call.out.dtype))


def _prod(call: OpCall) -> Extras | None:
    dim = call.argument(1, "dim")
    dim = dim if isinstance(dim, int) else None
    return _converting(call.args[0], dim, call.out.dtype, call.context, _accumulator(call.out.dtype))


@around_outputs
def _count_nonzero(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``count_nonzero``: where the input is not zero, summed as int64 (TensorAdvancedIndexing.cpp,
    ``count_nonzero_cuda``)."""
    source = call.args[0]
    if not source.numel():
        return
    before.take(source.numel())
    after.take(source.numel() * 8)
    shape = tuple(source.shape)
    if source.dim() and source.numel() >= 4096:
        strides = source.stride() if is_dense(source) else torch.empty(shape, device="meta").stride()
        dims = _dims(call.argument(1, "dim"), source.dim())
        _reduce(after, shape, strides, 8, dims, _Accumulator(8), call.context)


def _extreme(call: OpCall) -> Extras | None:
    """``amax``, ``amin``, ``max()``, ``min()``: accumulate in the input's own type
    (ReduceMinValuesKernel.cu)."""
    halves = call.args[0].dtype in _HALVES
    return reduce_extras(
        call.args[0],
        call.argument(1, "dim"),
        call.args[0].element_size(),
        call.context,
        accumulates=not halves,
    )


def _both_extremes(call: OpCall) -> Extras | None:
    """``aminmax``: pairs of values (ReduceMinValuesKernel.cu, ``aminmax_allreduce_launch_kernel``)."""
    dim = call.kwargs.get("dim", call.argument(1, "dim"))
    return reduce_extras(call.args[0], dim, 2 * call.args[0].element_size(), call.context, accumulates=False)


def _with_index(call: OpCall) -> Extras | None:
    """``argmax``, ``max(dim)``: pairs of a value and an int64 index, 16 bytes (ReduceOps.cu,
    TensorCompare.cu)."""
    return reduce_extras(call.args[0], call.argument(1, "dim"), 16, call.context, accumulates=False)


def _argument(call: OpCall) -> Extras | None:
    """``argmax``, ``argmin``: over a whole tensor, of its contiguous form (ReduceOps.cpp,
    ``argmax_argmin_impl``)."""
    source = call.args[0]
    if call.argument(1, "dim") is not None or source.is_contiguous():
        return _with_index(call)
    scratch = Scratch()
    scratch.take(nbytes(source))
    _reduce(
        scratch,
        (source.numel(),),
        (1,),
        source.element_size(),
        frozenset({0}),
        _Accumulator(16),
        call.context,
    )
    return sequence(after=scratch)


def _logical(call: OpCall) -> Extras | None:
    """``any``, ``all``: booleans (ReduceLogicKernel.cu)."""
    return reduce_extras(call.args[0], call.argument(1, "dim"), 1, call.context)


def _norm(call: OpCall) -> Extras | None:
    """``linalg_vector_norm`` and ``norm``: real numbers, float32 for halves (ReduceNormKernel.cu)."""
    source = call.args[0]
    accumulator = max(4, source.element_size() // (2 if source.is_complex() else 1))
    halves = source.dtype in _HALVES and call.out.dtype in _HALVES
    dim = call.argument(2, "dim")
    return reduce_extras(source, dim, accumulator, call.context, accumulates=not halves)


def _variance(call: OpCall) -> Extras | None:
    """``var``, ``std``, ``var_mean``: Welford's four numbers (ReduceMomentKernel.cu), two values a load."""
    size = 32 if call.args[0].element_size() == 8 else 16
    return reduce_extras(
        call.args[0], call.argument(1, "dim"), size, call.context, vector=2, accumulates=False
    )


RULES: dict[OpOverload, Rule] = table(
    {
        ("sum.dim_IntList", "mean.dim", "nansum", "sum.IntList_out", "mean.out"): _sum,
        ("sum", "mean"): _sum_all,
        ("prod", "prod.dim_int"): _prod,
        ("count_nonzero", "count_nonzero.dim_IntList"): _count_nonzero,
        ("amax", "amin", "max", "min"): _extreme,
        ("aminmax", "_aminmax", "_aminmax.dim"): _both_extremes,
        ("max.dim", "min.dim"): _with_index,
        ("argmax", "argmin"): _argument,
        ("any", "any.dim", "any.dims", "all", "all.dim", "all.dims"): _logical,
        # The whole of `any` and `all`, which anomaly detection asks (TensorCompare.cpp).
        ("_is_any_true", "_is_all_true"): _logical,
        ("linalg_vector_norm", "linalg_vector_norm.out"): _norm,
        ("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar"): _norm,
        ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"): _variance,
    }
)
