"""Sparse CSR and CSC tensors: three dense parts (compressed indices, plain indices, values) and products of them.

Each part is placed and metered like a tensor of the program. Views and shapes are torch's own on the meta device. What
cuSPARSE takes for itself (``cusparseSpMM_bufferSize``) is closed: an error bar of the kernel's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.describe import COMPRESSED, MATRIX_AT
from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_aten = torch.ops.aten
_SPARSE_ADDMM = _aten._sparse_addmm.default


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compressed indices, plain indices and values of a tensor of a compressed layout."""
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def build(
    mode: OpRunner, parts: Sequence[torch.Tensor], size: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    """A fake tensor of a compressed layout over three fake tensors, whose storages it shares and keeps."""
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
    return build(mode, fakes, tuple(size), call.kwargs["layout"])


def multiply(mode: OpRunner, call: OpCall) -> torch.Tensor:
    """A CSR or CSC matrix times a dense matrix or vector.

    ``mm`` makes a CSR matrix of a CSC one, zeros to add to, and the sum (native/sparse/SparseCsrTensorMath.cpp,
    ``_sparse_csr_mm``). ``addmm`` and ``mv`` make their result before they convert the matrix
    (native/sparse/cuda/SparseCsrTensorMath.cu and SparseBlasImpl.cpp, ``addmm_out_sparse_csr``).

    Raises:
        NotImplementedError: the other factor is sparse, too, or the first one is dense.
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
    return build(mode, parts, tuple(matrix.shape), torch.sparse_csr)


def _turned(
    mode: OpRunner,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New parts for the elements of a CSC matrix in the order of its rows; nobody knows which they are.

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


def download(
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
