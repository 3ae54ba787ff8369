"""Sparse COO tensors: what FakeTensorMode does not describe, made of dense ops on their indices and values.

Each dense part is placed and metered like an op of the program. Coalescing takes every element for distinct: an upper
bound. Other layouts, and products of two sparse matrices, are named in an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.capture.ops import tensors_in
from vramfit.virtual.describe import is_compressed_product
from vramfit.virtual.fake_impls import compressed
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_Parts = Callable[..., torch.Tensor]


def run(mode: OpRunner, call: OpCall) -> Any:
    """The op's result, from ops on indices and values.

    Raises:
        NotImplementedError: there is no rule for it.
    """
    if is_compressed_product(call.func, call.args):
        return compressed.multiply(mode, call)
    name = call.func._schema.name.removeprefix("aten::")
    with mode:
        if (
            name in _MATRIX_PRODUCTS
            and call.args[0].layout is torch.sparse_coo
            and call.args[1].layout is torch.strided
        ):
            start = call.args[1].new_zeros((call.args[0].shape[0], call.args[1].shape[1]))
            return torch.ops.aten._sparse_addmm.default(start, call.args[0], call.args[1])
        if name in _COALESCING:
            return _coalesced(mode, call.args[0])
        if name == "add" and not call.kwargs:
            return _sum(call.args[0], call.args[1])
        if name == "_sparse_softmax":
            source = call.args[0] if call.args[0].is_coalesced() else _coalesced(mode, call.args[0])
            return _with_values(source, torch.empty_like(source._values()))
        if name == "sparse_mask":
            return _masked(mode, call.args[0], call.args[1])
        if name in _ON_VALUES and not any(t.dim() for t in tensors_in(call.args[1:])):
            source = call.args[0]
            return _with_values(source, call.func(source._values(), *call.args[1:], **call.kwargs))
    message = (
        f"the virtual GPU has no rule for {call.func} of sparse tensors yet, and does not run ops for real"
    )
    mode.machine.warn("op-without-rule", message)
    raise NotImplementedError(f"vramfit: {message}")


_MATRIX_PRODUCTS = frozenset({"mm", "_sparse_mm"})
_COALESCING = frozenset({"_coalesce", "coalesce"})
# Ops that keep zero, so that they work on the values alone (native/sparse/SparseUnaryOps.cpp, SparseTensorMath.cpp).
_ON_VALUES = frozenset(
    {
        *(
            "detach",
            "mul",
            "div",
            "neg",
            "abs",
            "sqrt",
            "sin",
            "tanh",
            "relu",
            "sign",
            "floor",
            "ceil",
            "round",
        ),
        *("trunc", "expm1", "log1p", "asin", "atan", "sinh", "tan", "erf", "isnan", "positive"),
    }
)


def _with_values(
    source: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    distinct: bool | None = None,
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        source._indices() if indices is None else indices,
        values,
        source.shape,
        is_coalesced=source.is_coalesced() if distinct is None else distinct,
        check_invariants=False,
    )


def _coalesced(mode: OpRunner, source: torch.Tensor) -> torch.Tensor:
    """Sorted and summed where places repeat (native/sparse/cuda/SparseCUDATensor.cu, ``_coalesce_sparse_cuda``).

    Meanwhile there are flat positions, where they came from, and where each place begins.
    """
    indices, values = source._indices(), source._values()
    if values.shape[0] < 2:
        return _with_values(source, values.clone(), indices.clone(), distinct=True)
    mode.machine.warn(
        "shape-from-data",
        "the result of coalesce has a shape that depends on data: distinct places are assumed (an upper bound)",
        location=mode.guesses.location(),
    )
    count = values.shape[0]
    scratch = [torch.empty(count, dtype=torch.int64, device=values.device) for _ in range(3)]
    result = torch.empty_like(values, memory_format=torch.contiguous_format)
    places = torch.empty_like(indices, memory_format=torch.contiguous_format)
    mode.shadows.forget(result)  # nobody has sorted and summed them
    mode.shadows.forget(places)
    del scratch
    return _with_values(source, result, places, distinct=True)


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of two sparse tensors both sets of elements (SparseCUDATensorMath.cu, ``add_out_sparse_cuda``); of a dense and
    a sparse one a dense one (``add_out_dense_sparse_cuda``)."""
    if first.layout is torch.strided:
        return first.clone()
    values = torch.cat([first._values(), second._values()])
    indices = torch.cat([first._indices(), second._indices()], 1)
    return _with_values(first, values, indices, distinct=False)


def _masked(mode: OpRunner, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor where a sparse one has some, by flat positions (SparseTensor.cpp, ``sparse_mask``)."""
    indices = mask._indices()
    flat = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    if source.layout is torch.strided:
        values = source.contiguous().view(-1).index_select(0, flat)
    else:  # both sets of positions, one found in the other
        places = torch.empty(source._values().shape[0], dtype=torch.int64, device=indices.device)
        values = torch.empty_like(mask._values())
        mode.shadows.forget(values)
        del places
    return _with_values(mask, values, indices.clone())
