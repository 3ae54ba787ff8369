"""Ops that FakeTensorMode cannot describe, or describes wrongly: which they are, and what a user can do about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._library.simple_registry import singleton

from vramfit.capture.ops import tensors_in

_aten = torch.ops.aten

OF_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "inductor")
"""Namespaces of torch's own operators."""

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc})
"""Layouts of matrices of which torch makes a product in several ops."""

MATRIX_AT: dict[torch._ops.OpOverload, int] = {
    _aten.mm.default: 0,
    _aten._sparse_mm.default: 0,
    _aten._sparse_sparse_matmul.default: 0,
    _aten.mv.default: 0,
    _aten.addmm.default: 1,
    _aten._sparse_addmm.default: 1,
}
"""Products of matrices: the place of the first among the arguments; the other follows."""

MISDESCRIBED = frozenset({_aten.add.Tensor})
"""Ops that FakeTensorMode describes, of sparse tensors without elements."""


class SparseOperation(Exception):
    """An op that FakeTensorMode cannot describe has sparse arguments."""


class DynamicSizes(Exception):
    """The fake implementation of a custom operator asks for a size that depends on data."""


def has_sparse(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sparse COO tensor is among the arguments."""
    return any(t.layout is torch.sparse_coo for t in tensors_in((args, tuple(kwargs.values()))))


def is_compressed_product(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an op is a product with a CSR or CSC matrix, which torch makes of several."""
    first = MATRIX_AT.get(func)
    return first is not None and any(factor.layout in COMPRESSED for factor in args[first : first + 2])


def fake_implementation(func: torch._ops.OpOverload) -> Any:
    """The description that the author of a custom operator gave; None without one."""
    return singleton.find(func.name()).fake_impl.kernel


def advice(func: torch._ops.OpOverload) -> str:
    """What the user can do about an operator that nobody described; empty for torch's own."""
    if func.namespace in OF_TORCH:
        return ""
    return (
        f'. Describe it: @torch.library.register_fake("{func._schema.name}") or '
        f'@vramfit.fake_kernel("{func._schema.name}"), in the program or in a file for --kernels (docs/kernels.md)'
    )
