"""Results whose size depends on data, and counting: nonzero, masked_select, unique, bincount, histc, searchsorted.

aten/src/ATen/native/cuda/Nonzero.cu, IndexKernel.cpp (``masked_select_out_cuda_impl``), Unique.cu, UniqueCub.cu,
SummaryOps.cu, native/BucketizationUtils.h.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import (
    encode_bytes,
    reduce_bytes,
    scan_bytes,
    scan_error,
    select_bytes,
    sort_bytes,
    sort_error,
)
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    after_outputs,
    around_outputs,
    before_outputs,
    ceil_div,
    nbytes,
    table,
)
from vramfit.virtual.kernels.sorting import stable_sort
from vramfit.virtual.op_call import KernelContext, OpCall

_INDEX = 8
_CHUNK = 2**30  # nonzero_cuda_out_impl: elements counted at a time beyond 2**31 - 1


def nonzero(before: Scratch, after: Scratch, source: torch.Tensor, ctx: KernelContext) -> None:
    """Temporaries of ``nonzero_cuda_out_impl``: a count, then flat positions, in chunks."""
    count = source.numel()
    if not count:
        return
    chunks = 1 if count < 2**31 - 1 else ceil_div(count, _CHUNK)
    chunk = count if chunks == 1 else _CHUNK
    before.copy(source)
    before.take(4 * chunks)
    counting = reduce_bytes(chunk, 4, ctx)
    before.use(counting)
    storage = select_bytes(chunk, _INDEX)
    after.use(storage)
    before.doubt((max(counting, storage), max(counting, storage) // 2))


@around_outputs
def _nonzero(call: OpCall, before: Scratch, after: Scratch) -> None:
    nonzero(before, after, call.args[0], call.context)


@after_outputs
def _nonzero_static(call: OpCall, scratch: Scratch) -> None:
    """``nonzero_static_cuda_out_impl``: a count and a running count of each block of 512 x 16 elements."""
    source = call.args[0]
    count = source.numel()
    if not count:
        return
    scratch.copy(source)
    tile = 512 * 16
    target = call.context.spec.sm_count * (2 if source.element_size() == 1 else 1)
    rounds = ceil_div(ceil_div(count, tile), target)
    blocks = ceil_div(count, rounds * tile)
    scratch.take(blocks * 4)
    scratch.take(blocks * _INDEX)


@before_outputs
def _masked_select(call: OpCall, scratch: Scratch) -> None:
    """``masked_select``: tensor and mask are broadcast, the mask's positions found, and the tensor indexed by them.

    IndexKernel.cpp ``masked_select_out_cuda_impl`` calls ``index`` with the expanded mask, which turns it into
    positions (IndexingUtils.h, ``expandTensors``).
    """
    source, mask = call.args[:2]
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    count = shape.numel()
    if not count:
        return
    expanded = mask.shape != shape
    scratch.take(count if expanded else 0)  # an expanded mask is copied to be counted
    scratch.take(4)
    counting = reduce_bytes(count, 4, call.context)
    scratch.use(counting)
    scratch.take(call.out.numel() * max(1, len(shape)) * _INDEX)
    storage = select_bytes(count, _INDEX)
    scratch.use(storage)
    scratch.doubt((max(counting, storage), max(counting, storage) // 2))


@around_outputs
def _unique(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``_unique2``: a sorted copy, with its order if the inverse is wanted (UniqueCub.cu, ``unique_cuda_template``)."""
    source = call.args[0]
    count, element = source.numel(), source.element_size()
    if not count:
        return
    ordered = bool(call.argument(2, "return_inverse", False))
    counted = bool(call.argument(3, "return_counts", False))
    before.copy(source)
    if source.dtype is torch.bool:  # counting them is enough
        before.take(4)
        before.use(reduce_bytes(count, 4, call.context))
        return
    before.take(count * element)
    span = before.take(count * _INDEX if ordered else 0)
    before.take(count * _INDEX if ordered else 0)
    value = _INDEX if ordered else 0
    before.use(sort_bytes(count, element, value, call.context, floating=source.is_floating_point()))
    before.doubt(sort_error(count, element, value, call.context))
    before.give(span)
    if ordered:  # before values and counts exist; their peak is no higher than that of the sort
        after.use(scan_bytes(count, _INDEX))
    _distinct(after, count, element, counted)


def _distinct(after: Scratch, count: int, element: int, counted: bool) -> None:
    """The length, and storage to drop or to count what repeats (UniqueCub.cu, ``compute_unique``)."""
    after.take(_INDEX)
    storage = encode_bytes(count) if counted else select_bytes(count, element)
    after.use(storage)
    after.doubt(scan_error(storage))


@around_outputs
def _unique_consecutive(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``unique_consecutive`` of a whole tensor: as above without sorting; 32-bit marks of where values change."""
    source = call.args[0]
    count, element = source.numel(), source.element_size()
    if not count or call.argument(3, "dim") is not None:
        return
    before.copy(source)
    before.take(count * 4 if call.argument(1, "return_inverse", False) else 0)
    _distinct(after, count, element, bool(call.argument(2, "return_counts", False)))


@before_outputs
def _unique_dim(call: OpCall, scratch: Scratch) -> None:
    """``unique_dim``: rows are compared through an index array that Thrust sorts (Unique.cu, ``unique_dim_cuda``).

    Beside its storage there are the rows as one matrix, sorted rows, and the index array.
    """
    source, dim = call.args[0], call.argument(1, "dim")
    count = source.shape[dim] if source.dim() else 1
    if not source.numel():
        return
    scratch.take(nbytes(source) if dim % max(source.dim(), 1) or not source.is_contiguous() else 0)
    scratch.take(count * _INDEX)
    merging = count * _INDEX + 4096  # Thrust's merge sort keeps a second array
    scratch.use(merging)
    scratch.doubt((merging, merging // 2))
    scratch.take(nbytes(source))


@before_outputs
def _histogram(call: OpCall, scratch: Scratch) -> None:
    """``bincount`` and ``histc`` look for the least and the largest value first (SummaryOps.cu).

    ``bincount`` converts weights that are not float32 to float64.
    """
    source = call.args[0]
    if not source.numel():
        return
    reducing = reduce_extras(source, None, source.element_size(), call.context)
    for _ in range(2):
        number = scratch.take(source.element_size())
        partial = [scratch.take(size) for size in (reducing.after if reducing else ())]
        scratch.give(*partial, number)
    weights = call.argument(1, "weights")
    if isinstance(weights, torch.Tensor) and weights.dtype not in (torch.float32, torch.float64):
        scratch.take(weights.numel() * 8)


def _searchsorted(boundaries_at: int, input_at: int) -> Rule:
    """``searchsorted``, ``bucketize``: contiguous copies, and both in one type.

    BucketizationUtils.h ``searchsorted_maybe_trim_input_tensors``.
    """

    @after_outputs
    def rule(call: OpCall, scratch: Scratch) -> None:
        tensors = [call.args[boundaries_at], call.args[input_at]]
        if not isinstance(tensors[1], torch.Tensor):
            scratch.take(tensors[0].element_size())
            tensors = tensors[:1]
        for tensor in tensors:
            scratch.copy(tensor)
        if len(tensors) == 2 and tensors[0].dtype != tensors[1].dtype:
            common = torch.result_type(*tensors)
            for tensor in tensors:
                scratch.take(0 if tensor.dtype == common else tensor.numel() * common.itemsize)
        scratch.copy(call.kwargs.get("sorter"))

    return rule


@after_outputs
def _isin(call: OpCall, scratch: Scratch) -> None:
    """``isin``: many test elements are sorted together with the elements.

    native/TensorCompare.cpp ``isin_Tensor_Tensor_out`` compares directly while the test elements are fewer than
    10 x numel ** 0.145; else ``isin_sorting`` takes unique values (unless told they are), concatenates and sorts.
    """
    elements, tests = call.args[:2]
    if not (isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)):
        return
    if tests.numel() < 10 * elements.numel() ** 0.145 or not elements.numel():
        return
    width = elements.element_size()
    scratch.take(elements.numel() * width)  # unique values, their order,
    scratch.take(elements.numel() * _INDEX)
    scratch.take(tests.numel() * width)
    count = elements.numel() + tests.numel()
    scratch.take(count * width)  # all of them, sorted, with their order
    scratch.take(count * width)
    scratch.take(count * _INDEX)
    stable_sort(scratch, count, count, width, call.context)
    scratch.take(count)  # where neighbours are equal, and that in the order of before
    scratch.take(count)


RULES: dict[OpOverload, Rule] = table(
    {
        "nonzero": _nonzero,
        "nonzero_static": _nonzero_static,
        "masked_select": _masked_select,
        ("_unique2", "_unique"): _unique,
        "unique_consecutive": _unique_consecutive,
        ("unique_dim", "unique_dim_consecutive"): _unique_dim,
        ("bincount", "histc"): _histogram,
        ("searchsorted.Tensor", "searchsorted.Scalar"): _searchsorted(0, 1),
        ("bucketize.Tensor", "bucketize.Scalar"): _searchsorted(1, 0),
        "isin.Tensor_Tensor": _isin,
    }
)
