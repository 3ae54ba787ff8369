"""Sparse tensors, which FakeTensorMode does not describe: each op is made of dense ones, metered like the program's.

COO tensors have indices and values. Coalescing them takes every element for distinct: an upper bound. CSR and CSC
tensors have three dense parts (compressed indices, plain indices, values); views and shapes of them are torch's own on
the meta device. What cuSPARSE takes for itself (``cusparseSpMM_bufferSize``) is closed: the kernel's rule has an error
bar for it. Other layouts, and products of two sparse matrices, are named in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vramfit.capture.ops import tensors_in
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.describe import COMPRESSED, MATRIX_AT, is_compressed_product
from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_aten = torch.ops.aten
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_ADDMM = _aten._sparse_addmm.default


def run(mode: OpRunner, call: OpCall) -> Any:
    """The op's result, from ops on indices and values.

    Raises:
        NotImplementedError: there is no rule for it.
    """
    if is_compressed_product(call.func, call.args):
        return multiply_compressed(mode, call)
    name = call.func._schema.name.removeprefix("aten::")
    with mode:
        if (
            name in _MATRIX_PRODUCTS
            and call.args[0].layout is torch.sparse_coo
            and call.args[1].layout is torch.strided
        ):
            start = call.args[1].new_zeros((call.args[0].shape[0], call.args[1].shape[1]))
            return _SPARSE_ADDMM(start, call.args[0], call.args[1])
        if name in _COALESCING:
            return _coalesced(mode, call.args[0])
        if name in _COPYING:
            return _COPYING[name](call)
        if name == "add" and not call.kwargs:
            return _sum(call.args[0], call.args[1])
        if (
            name == "add_"
            and call.args[0].layout is torch.strided
            and call.args[1].layout is torch.sparse_coo
        ):
            return _added(call.args[0], call.args[1])
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


def _cloned(call: OpCall) -> torch.Tensor:
    source = call.args[0]
    return _with_values(source, source._values().clone(), source._indices().clone())


def _converted(call: OpCall) -> torch.Tensor:
    source, place = call.args[0], call.kwargs.get("device")
    values = source._values().to(dtype=call.kwargs.get("dtype"), device=place, copy=True)
    return _with_values(source, values, source._indices().to(device=place, copy=True))


def _transposed(call: OpCall) -> torch.Tensor:
    """A copy with rows of indices changed (native/TensorShape.cpp, ``transpose``, ``sparse_transpose_``)."""
    source, first, second = (*call.args, 0, 1)[:3]
    first, second = first % source.dim(), second % source.dim()
    order = list(range(source.dim()))
    order[first], order[second] = second, first
    if max(first, second) >= source.sparse_dim():
        raise RuntimeError(
            f"sparse transpose: transposed dimensions must be sparse. "
            f"Got sparse_dim: {source.sparse_dim()}, d0: {first}, d1: {second}"
        )
    rows = source._indices()
    swapped = torch.stack([rows[number] for number in order[: source.sparse_dim()]])
    return torch.sparse_coo_tensor(
        swapped,
        source._values().clone(),
        [source.shape[number] for number in order],
        is_coalesced=False,
        check_invariants=False,
    )


_COPYING: dict[str, Callable[[OpCall], torch.Tensor]] = {
    "clone": _cloned,
    "_to_copy": _converted,
    "t": _transposed,
    "transpose": _transposed,
}
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


def _added(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """A dense tensor with a sparse one added to it (SparseCUDATensorMath.cu, ``add_out_dense_sparse_cuda``)."""
    if sparse._nnz() and not sparse.is_coalesced():
        places, dims = sparse._indices(), sparse.sparse_dim()
        flat = places.squeeze(0) if dims == 1 else torch.zeros_like(places[0])  # by ``flatten_indices``
        rows = dense.view(-1, *dense.shape[dims:])
        rows.index_add_(0, flat, sparse._values().to(dense.dtype))
    return dense


def _masked(mode: OpRunner, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor where a sparse one has some, by flat positions (SparseTensor.cpp, ``sparse_mask``).

    An element is whatever the mask has at one place: a row, for the gradient of an embedding.
    """
    indices = mask._indices()
    flat = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    if source.layout is torch.strided:
        elements = source.contiguous().view(-1, *mask.shape[mask.sparse_dim() :])
        values = elements.index_select(0, flat)
    else:  # both sets of positions, one found in the other
        places = torch.empty(source._values().shape[0], dtype=torch.int64, device=indices.device)
        values = torch.empty_like(mask._values())
        mode.shadows.forget(values)
        del places
    return _with_values(mask, values, indices.clone())


# -- CSR and CSC -----------------------------------------------------------------------------------------------------


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compressed indices, plain indices and values of a tensor of a compressed layout."""
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def build_compressed(
    mode: OpRunner, parts: Sequence[torch.Tensor], size: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    """A fake tensor of a compressed layout over three fake ones, whose storages it shares and keeps."""
    device = parts[-1].device
    metas = [
        torch.empty(0, dtype=part.dtype, device="meta").set_(
            part.untyped_storage(), part.storage_offset(), part.shape, part.stride()
        )
        for part in parts
    ]
    whole = _assembled(metas, size, layout)
    return FakeTensor(mode.fake, whole, device)


@rule(
    "aten.sparse_compressed_tensor.comp_plain_value_size",
    "aten._sparse_compressed_tensor_unsafe.default",
)
def make(mode: OpRunner, call: OpCall) -> torch.Tensor:
    """``torch.sparse_csr_tensor(crow, col, values)``: the parts as they are, moved to the card where they are not."""
    compressed, plain, values, size = call.args
    device = call.kwargs.get("device") or values.device
    dtype = call.kwargs.get("dtype") or values.dtype
    with mode:
        moved = [compressed.to(device), plain.to(device), values.to(device, dtype)]
    fakes = [part if type(part) is FakeTensor else mode.wrap(part) for part in moved]
    return build_compressed(mode, fakes, tuple(size), call.kwargs["layout"])


def multiply_compressed(mode: OpRunner, call: OpCall) -> torch.Tensor:
    """A CSR or CSC matrix times a dense matrix or vector.

    ``mm`` makes a CSR matrix of a CSC one, zeros to add to, and the sum (native/sparse/SparseCsrTensorMath.cpp,
    ``_sparse_csr_mm``). ``addmm`` and ``mv`` make their result before they convert the matrix
    (native/sparse/cuda/SparseCsrTensorMath.cu and SparseBlasImpl.cpp, ``addmm_out_sparse_csr``).

    Raises:
        NotImplementedError: both factors are sparse, or the first one is dense.
    """
    first = MATRIX_AT[call.func]
    matrix, dense = call.args[first : first + 2]
    if matrix.layout not in COMPRESSED or dense.layout is not torch.strided:
        message = (
            f"the virtual GPU has no rule for {call.func} of {matrix.layout} and {dense.layout} tensors yet"
        )
        mode.machine.warn("op-without-rule", message, location=mode.guesses.location())
        raise NotImplementedError(f"vramfit: {message}")
    out = mode.fake_empty((matrix.shape[0], *dense.shape[1:]), dense.dtype, dense.device)
    if first == 0 and dense.dim() == 2:
        by_rows = _by_rows(mode, matrix)
        with mode:
            start = dense.new_zeros(out.shape)
    else:
        start = call.args[0] if first else out
        mode.meter.adopt(out, mode.ops[_SPARSE_ADDMM].name)
        by_rows = _by_rows(mode, matrix)
    mode.settle(mode.call(_SPARSE_ADDMM, start, by_rows, dense), out)
    return out


def _by_rows(mode: OpRunner, matrix: torch.Tensor) -> torch.Tensor:
    """A CSR matrix with the elements of a CSC one; a CSR one as it is."""
    if matrix.layout is not torch.sparse_csc:
        return matrix
    with mode:  # metered like ops of the program
        parts = _turned(mode, *parts_of(matrix), tuple(matrix.shape))
    for part in parts:
        mode.shadows.forget(part)
    return build_compressed(mode, parts, tuple(matrix.shape), torch.sparse_csr)


def _turned(
    mode: OpRunner,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New parts for the elements of a CSC matrix in the order of its rows; their values are unknown.

    native/TensorConversions.cpp, ``sparse_compressed_to_flipped`` with a batch of one: what it names lives until its
    end, and the new plain indices are one of the two rows of the sorted places, so that both stay.
    """
    rows, columns = shape
    narrow = compressed.dtype is torch.int32
    offset = _batch_offset(compressed, plain)
    joined = _joined(compressed, offset, plain.shape[0])
    places = _places(joined, plain, rows, columns, narrow=narrow)
    keys = torch.arange(plain.shape[0], device=plain.device)  # written by ``flatten_indices``
    mode.shadows.forget(keys)
    mode.meter.expect(keys, None)
    order = keys.sort()[1]
    ordered = places.index_select(1, order)
    taken = values.index_select(0, order)
    counts = _aten._convert_indices_from_coo_to_csr.default(ordered[0], rows, out_int32=narrow)
    return _batched(counts, rows), ordered[1], taken


def _batch_offset(compressed: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    count = torch.tensor([plain.shape[0]], dtype=compressed.dtype, device=compressed.device)
    return count.expand(1).cumsum(-1).sub_(count)


def _joined(compressed: torch.Tensor, offset: torch.Tensor, elements: int) -> torch.Tensor:
    """The compressed indices of all matrices of the batch, of which there is one."""
    moved = compressed[:-1].add(offset)
    joined = torch.empty_like(compressed)
    joined[:-1].copy_(moved)
    joined[-1:].fill_(elements)
    return joined


def _places(
    compressed: torch.Tensor, plain: torch.Tensor, rows: int, columns: int, *, narrow: bool
) -> torch.Tensor:
    """Row and column of each element, as for a COO tensor."""
    places: torch.Tensor = _aten._convert_indices_from_csr_to_coo.default(
        compressed, plain, out_int32=narrow, transpose=True
    )
    batch = places[1].div(columns, rounding_mode="trunc")
    places[1].fmod_(columns)
    places[0].add_(batch * rows)
    return places


def _batched(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """``compressed_to_batched_compressed_indices`` of one matrix."""
    batched = torch.zeros_like(counts)
    if rows:
        batched[1:].copy_(counts[1:] - counts[:1])
    return batched


def download_compressed(
    source: torch.Tensor, dtype: torch.dtype, part_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A real tensor of the same layout on the host, each part copied by `part_of`."""
    compressed, plain, values = (part_of(part) for part in parts_of(source))
    return _assembled((compressed, plain, values.to(dtype)), tuple(source.shape), source.layout)


def _assembled(parts: Sequence[torch.Tensor], size: tuple[int, ...], layout: torch.layout) -> torch.Tensor:
    make: Any = torch.sparse_compressed_tensor  # torch's stub does not know its parts
    values = parts[-1]
    out: torch.Tensor = make(
        *parts, size, dtype=values.dtype, layout=layout, device=values.device, check_invariants=False
    )
    return out
