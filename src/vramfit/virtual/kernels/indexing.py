"""Indexing: accumulating writes sort their indices; deterministic ones sort as well.

aten/src/ATen/native/cuda/Indexing.cu (``index_put_with_sort_kernel``, ``index_add_cuda_impl``),
native/TensorAdvancedIndexing.cpp (``_index_put_impl_``, ``scatter_impl``), cuda/IndexKernel.cpp. Reading with index
tensors, ``gather``, ``index_select``, ``take``, ``put_``, ``index_fill``, ``scatter`` and ``masked_fill`` allocate
nothing but their outputs.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import scan_bytes, scan_error, sort_bytes, sort_error
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    after_outputs,
    nbytes,
    sequence,
    table,
    temporaries,
    workspace,
)
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_INDEX = 8
_MASKS = (torch.bool, torch.uint8)


def _index_put(call: OpCall) -> Extras | None:
    """``index_put_(self, indices, values, accumulate)`` of a program: out-of-range indices are looked for."""
    return _written(call, unsafe=False)


def _index_put_impl(call: OpCall) -> Extras | None:
    """``_index_put_impl_``: autograd's own writes are ``unsafe``, forward has checked their indices."""
    return _written(call, unsafe=bool(call.argument(4, "unsafe", False)))


def _written(call: OpCall, *, unsafe: bool) -> Extras | None:
    target, indices, values = call.args[:3]
    accumulate = call.argument(3, "accumulate", False)
    if not (accumulate or (call.context.deterministic and values.numel() > 1)):
        return None
    scratch = Scratch()
    put_sorted(scratch, target, indices, values, call.context, unsafe=unsafe)
    return sequence(after=scratch)


def put_sorted(
    scratch: Scratch,
    target: torch.Tensor,
    indices: list[torch.Tensor | None],
    values: torch.Tensor,
    ctx: KernelContext,
    *,
    unsafe: bool,
) -> None:
    """Temporaries of ``index_put_with_sort_kernel``.

    Flat positions, the values expanded, sorted positions, their origin, a range, and CUB's storage. Masks must have
    been turned into positions.
    """
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in _MASKS for index in tensors):
        return
    count = torch.broadcast_shapes(*(index.shape for index in tensors)).numel()
    if not count:
        return
    scratch.copy(target)
    for index in tensors:
        scratch.take(index.numel() * _INDEX if index.dtype is torch.int32 else 0)
    _linear_index(scratch, tensors, target.device, count, ctx, unsafe=unsafe)
    whole, covered, slice_size = _slices(target, indices)
    expanded = count * (whole // covered if covered else 0)
    dense = values.numel() == expanded and values.is_contiguous()
    scratch.take(0 if dense else expanded * values.element_size())
    if not slice_size:
        return
    scratch.take(0 if _adjacent(indices) else nbytes(target))  # indexed dimensions come to the front
    positions = count * _INDEX
    for _ in range(3):
        scratch.take(positions)
    bits = max(1, ((whole - 1) // slice_size).bit_length())
    scratch.use(sort_bytes(count, _INDEX, _INDEX, ctx, bits=bits))
    scratch.doubt(sort_error(count, _INDEX, _INDEX, ctx))


def _slices(target: torch.Tensor, indices: list[torch.Tensor | None]) -> tuple[int, int, int]:
    """Elements of a tensor, positions of its indexed dimensions, and elements that each position addresses."""
    whole = target.numel()
    covered, after = 1, 1
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    for dim, size in enumerate(target.shape):
        if dim in indexed:
            covered *= size
        elif dim > indexed[0] or not _adjacent(indices):
            after *= size
    return whole, covered, after


def _adjacent(indices: list[torch.Tensor | None]) -> bool:
    """Whether the indexed dimensions are neighbours (IndexingUtils.h, ``hasContiguousSubspace``)."""
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    return indexed[-1] - indexed[0] + 1 == len(indexed)


def _linear_index(
    scratch: Scratch,
    indices: list[torch.Tensor],
    device: torch.device,
    count: int,
    ctx: KernelContext,
    *,
    unsafe: bool,
) -> None:
    """Flat positions from one index tensor for each dimension (Indexing.cu, ``computeLinearIndex``).

    Each index is wrapped into range and multiplied by its stride, where it lies; the products are added to the
    first of them. Where a program writes, the least and the largest index are compared with the size before that
    (``wrapIndexOnce``).
    """
    positions = count * _INDEX
    for number, index in enumerate(indices):
        here = index.device == device
        if here and not unsafe:
            ends = [scratch.take(_INDEX), scratch.take(_INDEX)]
            found = reduce_extras(index, None, 2 * _INDEX, ctx)
            for partial in reversed([scratch.take(size) for size in (found.after if found else ())]):
                scratch.give(partial)
            scratch.use(1)
            scratch.use(1)
            scratch.give(*reversed(ends))
        wrapped = scratch.take(positions) if here else 0
        product = scratch.take(positions)  # one on the host comes over as a finished product
        scratch.give(wrapped)
        if number:
            scratch.give(product)


@after_outputs
def _index_add(call: OpCall, scratch: Scratch) -> None:
    """``index_add``: atomic sums; in deterministic mode ``index_put_`` with accumulation of the scaled source."""
    target = call.args[0]
    if not call.context.deterministic or not target.dim():
        return
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    values = call.argument(3, "source")
    scratch.take(index.numel() * _INDEX if index.dtype is torch.int32 else 0)
    scratch.take(nbytes(values))  # source * alpha
    indices = [None] * (dim % target.dim()) + [index]
    put_sorted(scratch, target, indices, values.new_empty(values.shape), call.context, unsafe=False)


@after_outputs
def _index_copy(call: OpCall, scratch: Scratch) -> None:
    """``index_copy``: in deterministic mode ``index_put_`` without accumulation (TensorAdvancedIndexing.cpp)."""
    target = call.args[0]
    if not call.context.deterministic or not target.dim():
        return
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    values = call.argument(3, "source")
    if values.numel() > 1:
        indices = [None] * (dim % target.dim()) + [index]
        put_sorted(scratch, target, indices, values, call.context, unsafe=False)


@after_outputs
def _scatter(call: OpCall, scratch: Scratch) -> None:
    """``scatter`` and ``scatter_add``: in deterministic mode ``index_put_``.

    ``scatter_impl`` calls ``_scatter_via_index_put``: an index expanded over the other dimensions addresses whole
    slices; otherwise each other dimension gets a range of its own. Releases before that change wrote all positions
    into one array first, which the error bar covers.
    """
    target = call.args[0]
    if not call.context.deterministic or not target.dim():
        return
    dim, index = call.argument(1, "dim") % target.dim(), call.argument(2, "index")
    source = call.argument(3, "src")
    if not isinstance(source, torch.Tensor) or not index.numel():
        return
    others = [axis for axis in range(index.dim()) if axis != dim]
    part = source.as_strided(index.shape, source.stride())
    indices: list[torch.Tensor | None]
    if target.dim() == 1 or not any(index.stride(axis) for axis in others):
        for axis in reversed(others):
            index = index.select(axis, 0)
        indices = [None] * dim + [index]
    else:
        for axis in others:
            scratch.take(index.shape[axis] * _INDEX)
        indices = [index] * target.dim()
        scratch.doubt((index.numel() * index.dim() * _INDEX, 0))
    put_sorted(scratch, target, indices, part, call.context, unsafe=False)


def _scatter_reduce(call: OpCall) -> Extras | None:
    """``scatter_reduce`` with ``mean`` counts what falls into each place (``scatter_reduce_two``)."""
    if call.argument(4, "reduce") != "mean" or not isinstance(call.out, torch.Tensor):
        return None
    source = call.argument(3, "src")
    return temporaries(nbytes(source), nbytes(call.out), call.out.numel())


def _index(call: OpCall) -> Extras | None:
    """``index``: 32-bit indices are widened; a copy of one on the host (``make_info``, TensorAdvancedIndexing.cpp);
    positions of a mask, one int64 for each of its dimensions (``expandTensors``)."""
    sizes = []
    for place, index in enumerate(call.args[1]):
        if index is None:
            continue
        if index.dtype in _MASKS:
            found = call.out.shape[min(place, call.out.dim() - 1)] if call.out.dim() else 1
            sizes.append(found * index.dim() * _INDEX)
        elif index.device != call.args[0].device or index.dtype is torch.int32:
            sizes.append(index.numel() * _INDEX)
    return workspace(*sizes)


@after_outputs
def _masked_scatter(call: OpCall, scratch: Scratch) -> None:
    """``masked_scatter``: a running count of the mask (IndexKernel.cpp, ``masked_scatter__cuda``; IndexKernel.cu,
    ``launch_masked_scatter_kernel``), of contiguous tensors."""
    target, mask, source = call.args[:3]
    count = target.numel()
    scratch.take(count * _INDEX)
    scratch.take(0 if mask.shape == target.shape and mask.is_contiguous() else count)
    storage = scan_bytes(count, _INDEX)
    scratch.use(storage)
    scratch.doubt(scan_error(storage))
    scratch.copy(source)


@after_outputs
def _index_reduce(call: OpCall, scratch: Scratch) -> None:
    """``index_reduce`` with ``mean`` counts what falls into each place (Indexing.cu,
    ``index_reduce_func_cuda_impl``)."""
    if call.argument(4, "reduce") != "mean" or not isinstance(call.out, torch.Tensor):
        return
    scratch.take(nbytes(call.out))
    scratch.use(nbytes(call.argument(3, "source")))  # ones
    scratch.use(call.out.numel())  # where nothing fell


RULES: dict[OpOverload, Rule] = table(
    {
        ("index_put_", "index_put", "_unsafe_index_put"): _index_put,
        "_index_put_impl_": _index_put_impl,
        ("index_add", "index_add_"): _index_add,
        ("index_copy", "index_copy_"): _index_copy,
        ("scatter.src", "scatter_.src", "scatter_add", "scatter_add_"): _scatter,
        ("scatter_reduce.two", "scatter_reduce_.two"): _scatter_reduce,
        "index.Tensor": _index,
        ("masked_scatter", "masked_scatter_"): _masked_scatter,
        ("index_reduce", "index_reduce_"): _index_reduce,
    }
)
