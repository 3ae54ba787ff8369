"""Sorting and selecting by rank: sort, argsort, topk, kthvalue, median, mode.

aten/src/ATen/native/cuda/Sort.cpp (``sort_cuda_kernel``), SortStable.cu (``launch_stable_sort_kernel``),
TensorTopK.cpp and TensorTopK.cu, Sorting.cpp, TensorModeKernel.cpp.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import segmented_sort_bytes, sort_bytes, sort_error
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    after_outputs,
    around_outputs,
    before_outputs,
    ceil_div,
    is_dense,
    nbytes,
    table,
)
from vramfit.virtual.op_call import KernelContext, OpCall

_SMALL_SORT = 4096  # Sort.h, should_use_small_sort: sorted in place by one block per slice
_LARGE_SEGMENT = 1_000_000  # do_launch_stable_sort_kernel: one such slice keeps a card busy
_FEW_SEGMENTS = 128
_SMALL_MODE = 2048  # TensorModeKernel.cpp, MAX_BLOCK_SIZE: one block finds the mode of a slice
_INDEX = 8
_MAX_ITEMS = 2**31 - 1


def is_dense_along(source: torch.Tensor, dim: int) -> bool:
    """Whether slices along a dimension lie contiguously in memory without gaps (``sort_cuda_kernel``)."""
    if source.stride(dim) != 1:
        return False
    return source.is_contiguous() or is_dense(source)


def stable_sort(
    scratch: Scratch, count: int, length: int, element: int, ctx: KernelContext, *, floating: bool = False
) -> None:
    """Temporaries of ``launch_stable_sort_kernel``: index arrays and CUB's storage.

    Args:
        count: elements in all; at most 2**31 - 1 are sorted at a time.
        length: elements of one slice.
        element: bytes of an element.
    """
    count = min(count, _MAX_ITEMS // length * length)
    segments = count // length
    if segments == 1 or length >= _LARGE_SEGMENT:  # segmented_sort_large_segments
        indices = scratch.take(length * _INDEX)
        scratch.use(sort_bytes(length, element, _INDEX, ctx, floating=floating))
        scratch.doubt(sort_error(length, element, _INDEX, ctx))
        scratch.give(indices)
    elif segments < _FEW_SEGMENTS:  # segmented_sort_pairs_by_full_sort: by value, then stably by segment
        pairs = [scratch.take(count * 8), scratch.take(count * 8)]  # (index, segment), as int2
        values = scratch.take(count * element)  # sorted keys that nobody wants
        scratch.use(sort_bytes(count, element, 8, ctx, floating=floating))
        scratch.give(values)
        scratch.use(sort_bytes(count, 8, 0, ctx, bits=max(1, (segments - 1).bit_length())))
        scratch.doubt(sort_error(count, element, 8, ctx))
        scratch.give(*reversed(pairs))
    else:  # segmented_sort_pairs
        indices = scratch.take(count * _INDEX)
        scratch.use(segmented_sort_bytes(count, element, _INDEX))
        scratch.give(indices)


def sort(scratch: Scratch, source: torch.Tensor, dim: int, ctx: KernelContext, *, dense: bool = True) -> None:
    """Temporaries of ``sort_cuda_kernel``.

    Args:
        dense: whether the outputs are laid out like the source, as fresh ones are.
    """
    if not source.numel() or not source.dim():
        return
    length = source.shape[dim]
    if length <= _SMALL_SORT:
        scratch.use(length * _INDEX)  # fillSliceWithIndex: a range, copied into every slice
        return
    stand_ins = []
    if not (dense and is_dense_along(source, dim)):
        # Sorted beside the outputs, in slices that lie contiguously, then copied into them.
        stand_ins = [scratch.take(nbytes(source)), scratch.take(nbytes(source))]
        stand_ins.append(scratch.take(source.numel() * _INDEX))
    stable_sort(
        scratch, source.numel(), length, source.element_size(), ctx, floating=source.is_floating_point()
    )
    scratch.give(*reversed(stand_ins))


@after_outputs
def _sort_rule(call: OpCall, scratch: Scratch) -> None:
    sort(scratch, call.args[0], call.argument(1, "dim", -1), call.context)


@after_outputs
def _sort_stable_rule(call: OpCall, scratch: Scratch) -> None:
    """``sort.stable(self, *, stable, dim, descending)``."""
    sort(scratch, call.args[0], call.kwargs.get("dim", call.argument(2, "dim", -1)), call.context)


@around_outputs
def _argsort(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``argsort`` throws the sorted values away (native/Sorting.cpp)."""
    source = call.args[0]
    dim = call.kwargs.get("dim", next((a for a in call.args[1:] if type(a) is int), -1))
    before.take(nbytes(source))
    sort(after, source, dim, call.context)


@after_outputs
def _topk(call: OpCall, scratch: Scratch) -> None:
    """``topk_out_cuda``: radix selection, then a sort of the k found.

    Sorting everything is for AMD's cards and for CUDA before 11.6 (``should_use_sort``).
    """
    source, k = call.args[0], call.argument(1, "k")
    dim = call.argument(2, "dim", -1)
    if not source.dim() or not source.numel() or not k:
        return
    values = call.out[0]
    topk(scratch, source, k, dim, call.argument(4, "sorted", True), values, call.context)


def topk(
    scratch: Scratch,
    source: torch.Tensor,
    k: int,
    dim: int,
    ordered: bool,
    values: torch.Tensor,
    ctx: KernelContext,
) -> None:
    """Temporaries of ``topk_out_cuda`` into values like the given ones."""
    length = source.shape[dim]
    slices = source.numel() // length
    copy = scratch.copy(source)
    buffers = [scratch.take(n) for n in _multi_block_sizes(slices, length, source.element_size(), ctx)]
    scratch.give(*reversed(buffers), copy)
    if ordered and values.numel() > 1 and k > _SMALL_SORT:
        kept = [scratch.take(values.numel() * _INDEX), scratch.take(nbytes(values))]
        sort(scratch, values, dim, ctx)
        scratch.use(values.numel() * _INDEX)  # indices.gather(dim, sortedIndices)
        scratch.give(*reversed(kept))


# should_use_multiblock: slices up to this many, of at least so many elements.
_MULTI_BLOCK = (
    (20, 20_000),
    (40, 10_000),
    (80, 8_000),
    (199, 5_000),
    (799, 3_000),
    (4_000, 800),
    (1 << 32, 400),
)


def _multi_block_sizes(slices: int, length: int, element: int, ctx: KernelContext) -> list[int]:
    """Buffers of the selection that gives each slice several blocks (TensorTopK.cu, ``mbtopk::launch``).

    The k-th value, ranks still wanted and digits found of each slice, digit counts of each block and their
    sums over each slice, two running counts a block. Blocks have 256 threads of 4 to 64 elements each
    (``get_items_per_thread``), so that six blocks fill an SM.
    """
    if length < next(least for most, least in _MULTI_BLOCK if slices <= most):
        return []
    per_thread = ceil_div(slices * length, ctx.spec.sm_count * 6 * 256)
    blocks = slices * ceil_div(length, 256 * max(4, min(per_thread, 64)))
    digits = 2 * slices * max(4, element)
    return [slices * element, slices * 8, digits, blocks * 512, slices * 1024, blocks * 4, blocks * 4]


@before_outputs
def _kthvalue(call: OpCall, scratch: Scratch) -> None:
    """``kthvalue`` and ``median(dim)`` select in a contiguous copy (Sorting.cpp)."""
    scratch.copy(call.args[0])


@before_outputs
def _median(call: OpCall, scratch: Scratch) -> None:
    """``median()`` sorts the flattened tensor and looks at its middle (Sorting.cpp, ``median_impl``)."""
    source = call.args[0]
    if not source.numel():
        return
    count, element = source.numel(), source.element_size()
    scratch.copy(source)
    scratch.take(count * element)
    indices = scratch.take(count * _INDEX)
    if count <= _SMALL_SORT:
        scratch.use(count * _INDEX)
    else:
        stable_sort(scratch, count, count, element, call.context, floating=source.is_floating_point())
    scratch.give(indices)


@after_outputs
def _mode(call: OpCall, scratch: Scratch) -> None:
    """``mode``: slices that lie contiguously; longer than 2048, each is sorted with its positions by Thrust.

    TensorModeKernel.cpp ``mode_kernel_impl``, TensorModeKernel.cu ``calculate_mode``. Thrust's own storage is
    estimated as CUB's.
    """
    source = call.args[0]
    if not source.numel() or not source.dim():
        return
    dim = call.argument(1, "dim", -1)
    length, element = source.shape[dim], source.element_size()
    scratch.copy(source.transpose(dim, -1))
    if length > _SMALL_MODE:
        scratch.take(length * element)
        scratch.take(length * _INDEX)
        storage = sort_bytes(length, element, _INDEX, call.context)
        scratch.use(storage)
        scratch.doubt((storage + length * (element + _INDEX), storage))


RULES: dict[OpOverload, Rule] = table(
    {
        "sort": _sort_rule,
        "sort.stable": _sort_stable_rule,
        ("argsort", "argsort.stable"): _argsort,
        "topk": _topk,
        ("kthvalue", "median.dim", "nanmedian.dim"): _kthvalue,
        ("median", "nanmedian"): _median,
        "mode": _mode,
    }
)
