"""Matrix products: which library computes them, its workspace, and the copies of operands it cannot take as
they are.

NOTE [Workspaces]
torch gives cuBLAS and cuBLASLt their workspaces from the caching allocator (ATen/cuda/CublasHandlePool.cpp):

* The size is ``parseChosenWorkspaceSize``: 32 MiB on capability 9.0, from 2.12 on 9.x, 10.x and 12.x, from
  2.15 on 11.x too; elsewhere 2 x 4096 KiB + 8 x 16 KiB = 8,519,680 bytes. ``CUBLAS_WORKSPACE_CONFIG``
  ("``:4096:8``", a sum of KiB times count) overrides it.
* cuBLASLt (``getCUDABlasLtWorkspace``): in 2.11 it has its own, 1 MiB unless ``CUBLASLT_WORKSPACE_SIZE``
  (KiB), and asking for its handle sets up the cuBLAS workspace first. From 2.12 the two libraries share the
  cuBLAS one (``unified_cublas_and_lt_workspaces``) unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``.
* It is kept per handle and stream until ``torch._C._cuda_clearCublasWorkspaces()``. From 2.15 every op takes
  one of its own and gives it back, and the libraries are apart, unless ``TORCH_CUBLAS_WORKSPACE_CACHE=1``.
* It is taken when the product is launched, after the op's output exists (structured kernels allocate outputs
  first).

A handle belongs to a thread (``thread_local`` pool window over ``DeviceThreadHandlePool``): the program's
thread has one and the autograd engine's device thread another, so a training program holds two workspaces
per device. Recordings of training steps show exactly two, those of forward passes one.

torch's own description takes bfloat16 alone and, on a build without CUDA, leaves the padding of rows away.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from vramfit.virtual.kernels import convolution
from vramfit.virtual.kernels.rules import Rule, nbytes, overloads, round_up, table, temporaries
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_MIB = 1 << 20
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class Blas(Enum):
    """A library whose workspace a matrix product takes."""

    CUBLAS = "cublas"
    CUBLASLT = "cublaslt"


# -- workspaces: see NOTE [Workspaces] -----------------------------------------------------------------------


def cublas_workspace_bytes(ctx: KernelContext) -> int:
    """Bytes of a cuBLAS workspace (``parseChosenWorkspaceSize``)."""
    majors = {9} if ctx.torch_version < (2, 12) else {9, 10, 12}
    if ctx.torch_version >= (2, 15):
        majors.add(11)
    default = 32 * _MIB if ctx.capability[0] in majors else 2 * 4096 * 1024 + 8 * 16 * 1024
    config = ctx.environ.get("CUBLAS_WORKSPACE_CONFIG")
    pairs = _CONFIG.findall(config) if config is not None else []
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else default


def workspaces_are_unified(ctx: KernelContext) -> bool:
    """Whether cuBLASLt uses the workspace of cuBLAS (``unified_cublas_and_lt_workspaces``)."""
    flag = ctx.flag("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if ctx.torch_version < (2, 12):
        return flag is True
    if ctx.torch_version >= (2, 15) and ctx.flag("TORCH_CUBLAS_WORKSPACE_CACHE") is not True:
        return False
    return flag is not False


def cublaslt_workspace_bytes(ctx: KernelContext) -> int:
    """Bytes of a cuBLASLt workspace (``getCUDABlasLtWorkspaceSize``); that of cuBLAS when the two are one."""
    if workspaces_are_unified(ctx):
        return cublas_workspace_bytes(ctx)
    text = ctx.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    digits = re.match(r"\s*\+?([0-9]+)", text)  # std::stoi reads leading digits and ignores the rest
    return 1024 * (int(digits.group(1)) if digits else 1024)


def workspace_bytes(blas: Blas, ctx: KernelContext) -> int:
    """Bytes of a library's workspace."""
    return cublas_workspace_bytes(ctx) if blas is Blas.CUBLAS else cublaslt_workspace_bytes(ctx)


def workspace_is_cached(blas: Blas, ctx: KernelContext) -> bool:
    """Whether the workspace stays with its handle and stream, rather than lasting for one op."""
    del blas
    return ctx.torch_version < (2, 15) or ctx.flag("TORCH_CUBLAS_WORKSPACE_CACHE") is True


# -- which library -------------------------------------------------------------------------------------------


def takes_lt(args: tuple[Any, ...], ctx: KernelContext) -> bool:
    """Whether ``addmm`` goes to cuBLASLt with its bias in the epilogue.

    aten/src/ATen/native/cuda/Blas.cpp, ``isInputCompliesAddmmCudaLt``: beta is 1, the bias is contiguous and
    has one dimension (ones to its left aside) as long as the result is wide, no side of the operands is 1.
    """
    if ctx.environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, first, second = args[:3]
    if first.dtype not in _FLOATS or not bias.is_contiguous():
        return False
    shape = bias.shape
    if not shape or any(size != 1 for size in shape[:-1]) or shape[-1] != second.shape[1]:
        return False
    return bool(min(*first.shape, *second.shape) > 1)


def _gemm(dtype: torch.dtype, ctx: KernelContext) -> Blas:
    """Who computes a plain product (CUDABlas.cpp, ``gemm_internal`` and ``bgemm_internal``): cuBLAS, unless the
    program prefers cuBLASLt, which knows no complex numbers."""
    return Blas.CUBLASLT if ctx.prefers_cublaslt and dtype in _FLOATS else Blas.CUBLAS


_Library = Callable[[OpCall], Blas | None]


def _addmm(call: OpCall) -> Blas | None:
    if not call.args[1].numel() or not call.args[2].numel():
        return None
    if call.kwargs.get("beta", 1) == 1 and takes_lt(call.args, call.context):
        return Blas.CUBLASLT
    return _gemm(call.args[1].dtype, call.context)


def _product(first: int, second: int) -> _Library:
    """Products of matrices, or of batches of them."""

    def library(call: OpCall) -> Blas | None:
        return (
            _gemm(call.args[first].dtype, call.context)
            if call.args[first].numel() and call.args[second].numel()
            else None
        )

    return library


def _plain(first: int, second: int) -> _Library:
    """Products with vectors and triangular solves: cuBLAS whatever the program prefers."""

    def library(call: OpCall) -> Blas | None:
        return Blas.CUBLAS if call.args[first].numel() and call.args[second].numel() else None

    return library


def _lt(_call: OpCall) -> Blas | None:
    return Blas.CUBLASLT


def _bare_lt(call: OpCall) -> Blas | None:
    """``_int_mm`` (CUDABlas.cpp, ``int8_gemm``): a null workspace, but asking for the handle of cuBLASLt sets up
    that of cuBLAS, with its workspace, before 2.12."""
    return Blas.CUBLAS if call.context.torch_version < (2, 12) else None


def _grouped_is_fused(call: OpCall) -> bool:
    """Whether one CUTLASS kernel computes all groups (GroupedBlas.cpp, ``_grouped_mm_cuda``)."""
    bfloat16 = torch.bfloat16
    wanted = call.argument(4, "out_dtype") or bfloat16
    return (
        call.context.capability[0] in (9, 10)
        and call.args[0].dtype == call.args[1].dtype == wanted == bfloat16
    )


def _grouped(call: OpCall) -> Blas | None:
    """``_grouped_mm``: elsewhere one ``mm_out`` or ``bmm_out`` for each group (``_grouped_mm_fallback``)."""
    return None if _grouped_is_fused(call) else _gemm(call.args[0].dtype, call.context)


def _when(multiplies: Callable[[OpCall], bool]) -> _Library:
    """Ops some of whose kernels call cuBLAS."""

    def library(call: OpCall) -> Blas | None:
        return Blas.CUBLAS if multiplies(call) else None

    return library


_LIBRARY: dict[OpOverload, _Library] = {
    **dict.fromkeys(overloads("convolution", "_convolution"), _when(convolution.multiplies_columns)),
    **dict.fromkeys(overloads("convolution_backward"), _when(convolution.backward_multiplies_columns)),
    **dict.fromkeys(overloads("mm", "mm.out", "mm.dtype", "bmm", "bmm.out", "bmm.dtype"), _product(0, 1)),
    **dict.fromkeys(overloads("mv", "mv.out", "dot", "dot.out", "vdot", "vdot.out"), _plain(0, 1)),
    **dict.fromkeys(overloads("addmm", "addmm_", "addmm.out", "addmm.dtype", "_addmm_activation"), _addmm),
    **dict.fromkeys(
        overloads(
            *("baddbmm", "baddbmm_", "baddbmm.out", "baddbmm.dtype"),
            *("addbmm", "addbmm_", "addbmm.out"),
        ),
        _product(1, 2),
    ),
    **dict.fromkeys(overloads("addmv", "addmv_", "addmv.out"), _plain(1, 2)),
    **dict.fromkeys(overloads("_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2"), _lt),
    **dict.fromkeys(overloads("_int_mm", "_int_mm.out"), _bare_lt),
    **dict.fromkeys(overloads("_grouped_mm"), _grouped),
    **dict.fromkeys(overloads("linalg_solve_triangular", "triangular_solve"), _plain(0, 1)),
}


def blas_libraries(call: OpCall) -> tuple[Blas, ...]:
    """Workspaces that an op makes sure of, in order: none, the one that its library uses, or two (see the
    NOTE)."""
    rule = _LIBRARY.get(call.func)
    library = rule(call) if rule is not None else None
    if library is None:
        return ()
    if library is Blas.CUBLAS or workspaces_are_unified(call.context):
        return (Blas.CUBLAS,)
    if call.context.torch_version < (2, 12):
        # Asking for the handle of cuBLASLt sets up that of cuBLAS, workspace and all.
        return (Blas.CUBLAS, Blas.CUBLASLT)
    return (Blas.CUBLASLT,)


def may_use_blas(func: OpOverload) -> bool:
    """Whether `blas_libraries` asks anything to answer for an op."""
    return func in _LIBRARY


# -- copies of operands --------------------------------------------------------------------------------------


def _matrix_copy(matrix: torch.Tensor) -> int:
    """Bytes of the copy of a matrix that cuBLAS cannot take as it is.

    cuBlasCommonArgs.h, ``prepare_matrix_for_cublas``: taken are dense matrices of either order (the stride of a
    side of one does not count) and those of which one stride is 1 and the other at least as long as the side it
    steps over. A conjugated row-major operand is resolved first: cuBLAS conjugates only what it transposes, and
    row-major results swap and transpose the operands.
    """
    if matrix.is_contiguous():
        return nbytes(matrix) if matrix.is_conj() else 0
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    if row_stride == 1 and column_stride >= max(1, rows):
        return 0
    if column_stride == 1 and row_stride >= max(1, columns):
        return nbytes(matrix) if matrix.is_conj() else 0
    return 0 if matrix.t().is_contiguous() else nbytes(matrix)


def _batch_copy(matrices: torch.Tensor) -> int:
    """Bytes of the copy of a batch of matrices that cuBLAS cannot take as it is.

    Blas.cpp, ``prepare_batch_matrix_for_cublas``: as for one matrix, but strides of 0 (an expanded side) are
    refused even where the side is 1 long.
    """
    rows, columns = matrices.shape[1:]
    _, row_stride, column_stride = matrices.stride()
    if column_stride == 1 and row_stride >= max(1, columns):
        return nbytes(matrices) if matrices.is_conj() else 0
    if row_stride == 1 and column_stride >= max(1, rows):
        return 0
    if row_stride and column_stride and matrices.is_contiguous():
        return nbytes(matrices) if matrices.is_conj() else 0
    return nbytes(matrices)


def _result_copy(outputs: object) -> int:
    """Bytes of the stand-in for a result that cuBLAS cannot write in place (``out=`` and in-place forms)."""
    if not isinstance(outputs, torch.Tensor) or outputs.is_contiguous():
        return 0
    return _matrix_copy(outputs) if outputs.dim() == 2 else _batch_copy(outputs)


def _copies(first: int, second: int) -> Rule:
    def rule(call: OpCall) -> Extras | None:
        one, other = call.args[first], call.args[second]
        copy = _matrix_copy if one.dim() == 2 else _batch_copy
        return temporaries(_result_copy(call.out), copy(other), copy(one))

    return rule


def _vector_copies(matrix: int) -> Rule:
    """``addmv_out_cuda``: a matrix of other strides is made contiguous, and a vector expanded from one value."""

    def rule(call: OpCall) -> Extras | None:
        vector = call.args[matrix + 1]
        expanded = vector.stride(0) == 0 and vector.numel() > 1
        rows, columns = call.args[matrix].shape
        row_stride, column_stride = call.args[matrix].stride()
        by_row = column_stride == 1 and row_stride >= max(1, columns)
        fits = by_row or (row_stride == 1 and column_stride >= max(1, rows))
        copied = not fits and not call.args[matrix].is_contiguous()
        return temporaries(nbytes(vector) if expanded else 0, nbytes(call.args[matrix]) if copied else 0)

    return rule


def _int_mm(call: OpCall) -> Extras | None:
    """``_int_mm``: operands are prepared as for any product."""
    return temporaries(_matrix_copy(call.argument(1, "mat2")), _matrix_copy(call.args[0]))


_TENSOR_MAP = 128  # bytes of a CUtensorMap


def _grouped_mm(call: OpCall) -> Extras | None:
    """``_grouped_mm`` in one kernel: pointers, strides and shapes of the groups, then CUTLASS's workspace.

    GroupMM.cu, ``bf16bf16_grouped_gemm_impl_sm90_sm100``. The workspace is CUTLASS's own: a tensor map of each
    operand and of the result for every multiprocessor, give or take one.
    """
    if not _grouped_is_fused(call):
        return None
    first, second, offsets = call.args[0], call.args[1], call.argument(2, "offs")
    if first.dim() == second.dim() == 2:
        groups = offsets.numel()
    else:
        groups = (second if first.dim() == 2 else first).shape[0]
    pointers = 3 * 8 * round_up(groups, 2)
    shapes, strides = 3 * 4 * groups, 3 * 8 * groups
    maps = _TENSOR_MAP * call.context.spec.sm_count
    return temporaries(pointers + shapes + strides, 3 * maps, error_bytes=maps, error_below_bytes=maps)


RULES: dict[OpOverload, Rule] = table(
    {
        ("mm", "mm.out", "mm.dtype", "bmm", "bmm.out", "bmm.dtype"): _copies(0, 1),
        ("addmm", "addmm_", "addmm.out", "addmm.dtype", "_addmm_activation"): _copies(1, 2),
        ("baddbmm", "baddbmm_", "baddbmm.out", "baddbmm.dtype"): _copies(1, 2),
        ("mv", "mv.out"): _vector_copies(0),
        ("addmv", "addmv_", "addmv.out"): _vector_copies(1),
        "_int_mm": _int_mm,
        "_grouped_mm": _grouped_mm,
    }
)


# -- Results of products over groups of rows, as CUDA makes them ---------------------------------------------


_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BYTES = 16


def grouped_mm(
    mode: FakeTensorMode,
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    offs: Tensor | None = None,
) -> FakeTensor:
    """``_grouped_mm(left, right, offs)``: rows of the result start at multiples of 16 bytes.

    ATen/native/GroupedMMUtils.h, ``_grouped_mm_validate_inputs`` and ``create_grouped_gemm_output_tensor``.

    Raises:
        RuntimeError: arguments that the kernel refuses.
    """
    offsets = offs if offsets is None else offsets
    if left.dtype not in _TYPES or right.dtype != left.dtype:
        raise RuntimeError(
            "Expected mat_a and mat_b to have the same type out of BFloat16, Half and Float, "
            f"got {left.dtype} and {right.dtype}"
        )
    if left.dim() not in (2, 3) or right.dim() not in (2, 3):
        raise RuntimeError("mat_a and mat_b have to be 2 or 3d")
    if (left.dim() == 2 or right.dim() == 2) != (offsets is not None):
        raise RuntimeError(
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        )
    if (left.dim() == 3 or right.dim() == 3) and left.shape[-1] != right.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if bias is not None:
        raise RuntimeError("Bias not supported yet")
    shape = _shape(left, right, offsets)
    dtype = out_dtype or left.dtype
    row = round_up(shape[-1], _ROW_BYTES // dtype.itemsize)
    strides = (shape[1] * row, row, 1) if len(shape) == 3 else (row, 1)
    return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), left.device)


def _shape(left: Tensor, right: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if left.dim() == 2:
        if right.dim() == 2:
            assert offsets is not None
            return (offsets.shape[0], left.shape[0], right.shape[1])
        return (left.shape[0], right.shape[-1])
    if right.dim() == 2:
        return (left.shape[1], right.shape[1])
    if left.shape[0] != right.shape[0]:
        raise RuntimeError("batched dimension has to match")
    return (left.shape[0], left.shape[1], right.shape[-1])
