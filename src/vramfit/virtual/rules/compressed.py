"""Sparse CSR and CSC tensors: three dense parts (compressed indices, plain indices, values) and products of them.

Each part is placed and metered like a tensor of the program. Views and shapes are torch's own on the meta device. What
cuSPARSE takes for itself (``cusparseSpMM_bufferSize``) is closed: an error bar of the kernel's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.rules.registry import rule

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
LAYOUTS = frozenset({torch.sparse_csr, torch.sparse_csc})
_aten = torch.ops.aten
_SPARSE_ADDMM = _aten._sparse_addmm.default
# The place of the matrix among the arguments; the dense one follows.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten._sparse_mm.default: 0,
    _aten._sparse_sparse_matmul.default: 0,
    _aten.mv.default: 0,
    _aten.addmm.default: 1,
    _SPARSE_ADDMM: 1,
}


def is_product(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an op is a product with a CSR or CSC matrix, which torch makes of several."""
    first = _PRODUCTS.get(func)
    return first is not None and any(factor.layout in LAYOUTS for factor in args[first : first + 2])


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compressed indices, plain indices and values of a tensor of a compressed layout."""
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def build(
    mode: VirtualMode, parts: Sequence[torch.Tensor], size: tuple[int, ...], layout: torch.layout
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
def make(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.sparse_csr_tensor(crow, col, values)``: the parts as they are, moved to the card where they are not."""
    compressed, plain, values, size = args
    device = kwargs.get("device") or values.device
    dtype = kwargs.get("dtype") or values.dtype
    with mode:
        moved = [compressed.to(device), plain.to(device), values.to(device, dtype)]
    fakes = [part if type(part) is FakeTensor else mode.wrap(part) for part in moved]
    return build(mode, fakes, tuple(size), kwargs["layout"])


def multiply(mode: VirtualMode, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """A CSR or CSC matrix times a dense matrix or vector.

    ``mm`` makes zeros to add to, and the sum (native/sparse/SparseCsrTensorMath.cpp, ``_sparse_csr_mm``). A CSC matrix
    becomes a CSR one first: the same elements, by rows.

    Raises:
        NotImplementedError: the other factor is sparse, too, or the first one is dense.
    """
    first = _PRODUCTS[func]
    matrix, dense = args[first : first + 2]
    if matrix.layout not in LAYOUTS or dense.layout is not torch.strided:
        message = f"the virtual GPU has no rule for {func} of {matrix.layout} and {dense.layout} tensors yet"
        mode.machine.warn("op-without-rule", message, location=mode.guesses.location())
        raise NotImplementedError(f"vramfit: {message}")
    with mode:
        parts = _by_rows(mode, matrix) if matrix.layout is torch.sparse_csc else parts_of(matrix)
        starts = first == 0 and dense.dim() == 2
        start = dense.new_zeros((matrix.shape[0], dense.shape[1])) if starts else args[0]
    by_rows = build(mode, parts, tuple(matrix.shape), torch.sparse_csr)
    out = mode.fake_empty((matrix.shape[0], *dense.shape[1:]), dense.dtype, dense.device)
    mode.settle(_SPARSE_ADDMM, mode.ops[_SPARSE_ADDMM], (start, by_rows, dense), {}, out)
    return out


def _by_rows(mode: VirtualMode, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New parts for the elements of a CSC matrix in the order of its rows; nobody knows which they are."""
    _, plain, values = parts_of(matrix)
    counts = torch.empty(matrix.shape[0] + 1, dtype=plain.dtype, device=plain.device)
    made = counts, torch.empty_like(plain), torch.empty_like(values)
    for part in made:
        mode.shadows.forget(part)
    return made


def adopt_parts(mode: VirtualMode, out: Any, name: str) -> None:
    """Place the parts that an op on compressed tensors has made; those that it shares are placed already."""
    if type(out) is FakeTensor and out.layout in LAYOUTS and out.fake_device.type == "cuda":
        for part in parts_of(out):
            if mode.meter.record_of(part) is None:
                mode.meter.adopt(part, name)


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
