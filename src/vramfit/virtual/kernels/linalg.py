"""Linear algebra: copies, pivots and status words are torch's own and exact; cuSOLVER's work areas are estimates.

aten/src/ATen/native/BatchLinearAlgebra.cpp, cuda/linalg/BatchLinearAlgebra.cpp and BatchLinearAlgebraLib.cpp, with
cuSOLVER and cuBLAS preferred as in the default wheels. cuSOLVER answers ``*_bufferSize`` itself and is closed: the
estimates take a panel of 64 columns for one-sided factorisations, and a second and third matrix for the spectral
ones; the error bars reach from nothing to twice as much and a page.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, Scratch, after_outputs, before_outputs, nbytes, table
from vramfit.virtual.op_call import OpCall

_PANEL = 64  # columns that a blocked factorisation works on at a time
_POINTER = 8
_STATUS = 4  # an int32 for each matrix


def _of_matrices(fill: Callable[[OpCall, Scratch], None]) -> Rule:
    """The rule of an op that takes its blocks after its outputs, and none for an empty input."""
    rule = after_outputs(fill)
    return lambda call: rule(call) if call.args[0].numel() else None


def _matrices(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many matrices there are, their rows and their columns."""
    rows, columns = tensor.shape[-2:]
    return tensor.numel() // max(1, rows * columns), rows, columns


def _area(scratch: Scratch, size: int) -> None:
    """A work area of cuSOLVER, about that large."""
    scratch.use(size)
    scratch.doubt((size + 4096, size))


def _panels(scratch: Scratch, tensor: torch.Tensor) -> None:
    """The area of a one-sided factorisation of one matrix at a time (potrf, getrf, geqrf, orgqr, ormqr, sytrf)."""
    _, rows, columns = _matrices(tensor)
    _area(scratch, _PANEL * max(rows, columns) * tensor.element_size())


def _pointers(scratch: Scratch, tensor: torch.Tensor, arrays: int = 1) -> None:
    """Arrays of pointers to the matrices of a batch (``get_device_pointers``)."""
    batch, _, _ = _matrices(tensor)
    for _ in range(arrays):
        scratch.take(batch * _POINTER if batch > 1 else 0)


@_of_matrices
def _cholesky(call: OpCall, scratch: Scratch) -> None:
    """``linalg_cholesky_ex``: in the output; a batch through pointers."""
    source = call.args[0]
    if _matrices(source)[0] > 1:
        _pointers(scratch, source)
    else:
        _panels(scratch, source)


def _factored(scratch: Scratch, source: torch.Tensor) -> None:
    """``lu_factor``: cuSOLVER's getrf matrix by matrix, or cuBLAS's for a batch of small ones."""
    batch, rows, columns = _matrices(source)
    if batch > 1 and rows == columns and rows <= 128:
        _pointers(scratch, source)
    else:
        _panels(scratch, source)


@_of_matrices
def _lu(call: OpCall, scratch: Scratch) -> None:
    """``linalg_lu_factor_ex``: a column-major copy is the output."""
    _factored(scratch, call.args[0])


@_of_matrices
def _lu_parts(call: OpCall, scratch: Scratch) -> None:
    """``linalg_lu``: pivots, status and the permutation that they mean (``linalg_lu_out``, ``lu_unpack_out``)."""
    source = call.args[0]
    batch, rows, columns = _matrices(source)
    scratch.take(batch * min(rows, columns) * 4)
    scratch.take(batch * _STATUS)
    _factored(scratch, source)
    scratch.take(batch * rows * 8)


def _solved(scratch: Scratch, source: torch.Tensor) -> None:
    _factored(scratch, source)
    if _matrices(source)[0] > 1:
        _pointers(scratch, source, arrays=2)


@_of_matrices
def _solve(call: OpCall, scratch: Scratch) -> None:
    """``_linalg_solve_ex``: its factors are outputs, and the right-hand side is copied into the result."""
    _solved(scratch, call.args[0])


@_of_matrices
def _inverse(call: OpCall, scratch: Scratch) -> None:
    """``linalg_inv_ex``: solved for the identity, beside factors and pivots (``linalg_inv_ex_out``)."""
    source = call.args[0]
    batch, rows, _ = _matrices(source)
    scratch.take(nbytes(source))
    scratch.take(batch * rows * 4)
    _solved(scratch, source)


@_of_matrices
def _determinant(call: OpCall, scratch: Scratch) -> None:
    """``_linalg_det``, ``_linalg_slogdet``: factors and pivots are outputs; status, and the diagonal's product."""
    source = call.args[0]
    batch, rows, _ = _matrices(source)
    scratch.take(batch * _STATUS)
    _factored(scratch, source)
    scratch.take(batch * rows * source.element_size())


@_of_matrices
def _qr(call: OpCall, scratch: Scratch) -> None:
    """``linalg_qr``: the factors of the reflectors; Q is made where they were (``linalg_qr_out``)."""
    source = call.args[0]
    batch, rows, columns = _matrices(source)
    if call.argument(1, "mode", "reduced") == "r":
        scratch.take(nbytes(source))  # there is no Q to work in
    scratch.take(batch * min(rows, columns) * source.element_size())
    _panels(scratch, source)


@_of_matrices
def _reflectors(call: OpCall, scratch: Scratch) -> None:
    """``geqrf``, ``linalg_householder_product``, ``ormqr``, ``linalg_ldl_factor_ex``: work in their output."""
    _panels(scratch, call.args[0])


@_of_matrices
def _svd(call: OpCall, scratch: Scratch) -> None:
    """``_linalg_svd``: a copy that cuSOLVER overwrites, and the vectors even when only values are wanted
    (``svd_cusolver``)."""
    source = call.args[0]
    batch, rows, columns = _matrices(source)
    least, element = min(rows, columns), source.element_size()
    scratch.take(nbytes(source))
    scratch.take(batch * _STATUS)
    if not call.argument(2, "compute_uv", True):
        scratch.take(batch * rows * least * element)
        scratch.take(batch * columns * least * element)
    _area(scratch, (rows * columns + 2 * least * least) * element)


@_of_matrices
def _eigh(call: OpCall, scratch: Scratch) -> None:
    """``_linalg_eigh``: vectors replace a copy of the matrix, which is an output where they are wanted
    (``linalg_eigh_cusolver``)."""
    source = call.args[0]
    batch, rows, _ = _matrices(source)
    if not call.argument(2, "compute_v", True):
        scratch.take(nbytes(source))
    scratch.take(batch * _STATUS)
    _area(scratch, (2 * rows * rows + 8 * rows) * source.element_size())


@_of_matrices
def _eig(call: OpCall, scratch: Scratch) -> None:
    """``linalg_eig``: a copy that the solver overwrites; for real matrices also the vectors' real form
    (``linalg_eig_cusolver_xgeev``; MAGMA does it on the host)."""
    source = call.args[0]
    batch, rows, _ = _matrices(source)
    scratch.take(nbytes(source))
    scratch.take(batch * _STATUS)
    scratch.take(0 if source.is_complex() else nbytes(source))
    _area(scratch, 3 * rows * rows * source.element_size())


@_of_matrices
def _triangular(call: OpCall, scratch: Scratch) -> None:
    """``linalg_solve_triangular``, ``triangular_solve``: cuBLAS works in the result; a batch through pointers."""
    _pointers(scratch, call.args[0], arrays=2)


@_of_matrices
def _cholesky_solve(call: OpCall, scratch: Scratch) -> None:
    """``cholesky_solve``: a column-major copy of the factor beside that of the right-hand side, the result
    (``_cholesky_solve_helper_cuda``)."""
    scratch.take(nbytes(call.args[1]))
    _pointers(scratch, call.args[1], arrays=2)
    scratch.take(_STATUS)


@before_outputs
def _exponential(call: OpCall, scratch: Scratch) -> None:
    """``linalg_matrix_exp``: powers and their combinations, as many as the norm asks for.

    native/LinearAlgebra.cpp ``compute_T18`` keeps five of each and two products; smaller norms need three.
    """
    source = call.args[0]
    if not source.numel() or source.shape[-1] < 2:
        return
    size = nbytes(source)
    for copies in (5, 5, 2):
        scratch.take(copies * size)
    scratch.doubt((3 * size, 6 * size))


RULES: dict[OpOverload, Rule] = table(
    {
        ("linalg_cholesky_ex", "cholesky", "cholesky_inverse"): _cholesky,
        ("linalg_lu_factor_ex", "linalg_lu_factor"): _lu,
        "linalg_lu": _lu_parts,
        "_linalg_solve_ex": _solve,
        "linalg_inv_ex": _inverse,
        ("_linalg_det", "_linalg_slogdet"): _determinant,
        "linalg_qr": _qr,
        ("geqrf", "linalg_householder_product", "ormqr", "linalg_ldl_factor_ex"): _reflectors,
        "_linalg_svd": _svd,
        "_linalg_eigh": _eigh,
        ("linalg_eig", "linalg_eigvals"): _eig,
        ("linalg_solve_triangular", "triangular_solve", "linalg_lu_solve"): _triangular,
        ("cholesky_solve", "_cholesky_solve_helper"): _cholesky_solve,
        "linalg_matrix_exp": _exponential,
    }
)
