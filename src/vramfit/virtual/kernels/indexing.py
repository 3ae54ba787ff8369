"""Indexing: accumulating writes sort their indices; deterministic ones sort as well.

aten/src/ATen/native/cuda/Indexing.cu (``index_put_with_sort_kernel``, ``index_add_cuda_impl``) and
native/TensorAdvancedIndexing.cpp (``_index_put_impl_``). Reading with index tensors, ``gather``,
``index_select``, ``scatter`` and ``masked_fill`` allocate nothing but their outputs.
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
    given_back,
    nbytes,
    table,
    temporaries,
    workspace,
)
from vramfit.virtual.kernels.cub import scan_bytes, sort_bytes, sort_error

_INDEX = 8


def _index_put(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``index_put_(self, indices, values, accumulate)`` and ``_index_put_impl_``.

    Sorted when it accumulates (or must be deterministic): flat positions, the values expanded, a dense copy of
    the tensor, sorted positions, their origin, a range, and CUB's storage.
    """
    del outputs
    source, indices, values = args[:3]
    accumulate = argument(args, kwargs, 3, "accumulate", False)
    if not (accumulate or ctx.deterministic):
        return None
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    count = shape.numel()
    if not count:
        return None
    whole, covered = source.numel(), 1
    for dim, index in enumerate(indices):
        if index is not None:
            covered *= source.shape[dim]
    expanded = count * (whole // covered if covered else 0)
    positions = count * _INDEX
    copy = 0 if values.numel() == expanded and values.is_contiguous() else expanded * values.element_size()
    return temporaries(
        *_linear_index(tensors, source.device, positions),
        copy,
        0 if source.is_contiguous() else nbytes(source),
        *(positions, positions, positions),
        sort_bytes(count, _INDEX, _INDEX, ctx, bits=max(1, (covered - 1).bit_length())),
        error_bytes=sort_error(count, ctx),
    )


def _linear_index(indices: list[torch.Tensor], device: torch.device, positions: int) -> list[int]:
    """Flat positions from one index tensor for each dimension (Indexing.cu, ``computeLinearIndex``).

    Each index is wrapped into range and multiplied by its stride, where it lies; the products are added to the
    first of them.
    """
    blocks: list[int] = []
    taken = 0
    for number, index in enumerate(indices):
        here = 2 if index.device == device else 1  # one on the host comes over as a finished product
        blocks += [positions] * here
        taken += here
        if here == 2:
            blocks.append(given_back(taken - 1))
        if number:
            blocks.append(given_back(taken))
    return blocks


def _index_put_out_of_place(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``index_put``: a copy of the tensor, which is the output, then the same."""
    return _index_put(args, kwargs, outputs, ctx)


def _index_add(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``index_add``: atomic sums; in deterministic mode ``index_put_`` with accumulation."""
    del outputs
    source = args[0]
    if not ctx.deterministic or not source.dim():
        return None
    dim, index = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    values = argument(args, kwargs, 3, "source")
    indices = [None] * (dim % source.dim()) + [index]
    return _index_put((source, indices, values, True), {}, None, ctx)


def _index(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``index`` with a boolean mask: its positions first, one int64 for each dimension
    (``expandTensors``); with an index on the host: its copy (``make_info``, TensorAdvancedIndexing.cpp)."""
    del kwargs, ctx
    sizes = []
    for place, index in enumerate(args[1]):
        if index is None:
            continue
        if index.device != args[0].device:
            sizes.append(nbytes(index))
        if index.dtype in (torch.bool, torch.uint8):
            found = outputs.shape[min(place, outputs.dim() - 1)] if outputs.dim() else 1
            sizes.append(found * index.dim() * _INDEX)
    return workspace(*sizes)


def _masked_scatter(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``masked_scatter``: a running count of the mask (IndexKernel.cpp, ``masked_scatter__cuda``)."""
    del kwargs, outputs, ctx
    count = args[0].numel()
    return temporaries(count * _INDEX, scan_bytes(count, _INDEX))


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        ("index_put_", "_index_put_impl_", "_unsafe_index_put"): _index_put,
        "index_put": _index_put_out_of_place,
        ("index_add", "index_add_"): _index_add,
        "index.Tensor": _index,
        ("masked_scatter", "masked_scatter_"): _masked_scatter,
    }
)
