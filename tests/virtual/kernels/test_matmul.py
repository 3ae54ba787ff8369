import pytest
import torch

from vramfit.virtual.kernels import (
    Blas,
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    workspace_bytes,
    workspace_is_cached,
    workspaces_are_unified,
)

from .support import FAKE, ask, aten, blas_libraries, blas_library, context, cuda, extras

# parseChosenWorkspaceSize: 4096 KiB x 2 + 16 KiB x 8
SMALL = 8_519_680
LARGE = 33_554_432


@pytest.mark.parametrize(
    ("card", "version", "expected"),
    [
        ("T4", (2, 13), SMALL),
        ("A100 80GB", (2, 13), SMALL),
        ("RTX 4090", (2, 13), SMALL),
        ("H100 SXM", (2, 11), LARGE),
        ("H100 SXM", (2, 13), LARGE),
        ("RTX 5090", (2, 11), SMALL),
        ("RTX 5090", (2, 13), LARGE),
        ("B200", (2, 12), LARGE),
    ],
)
def test_cublas_workspace_by_capability_and_version(card, version, expected):
    assert cublas_workspace_bytes(context(card, version)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (":4096:8", 4096 * 1024 * 8),
        (":16:8", 16 * 1024 * 8),
        (":4096:2:16:8", SMALL),
        (":0:0", 0),
        ("nonsense", SMALL),
    ],
)
def test_workspace_config_overrides_the_size(config, expected):
    ctx = context(environ={"CUBLAS_WORKSPACE_CONFIG": config})
    assert cublas_workspace_bytes(ctx) == expected


def test_lt_shares_the_workspace_of_cublas_since_2_12():
    assert workspaces_are_unified(context(version=(2, 12)))
    assert cublaslt_workspace_bytes(context(version=(2, 12))) == SMALL
    apart = context(version=(2, 13), environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"})
    assert not workspaces_are_unified(apart)
    assert workspace_bytes(Blas.CUBLASLT, apart) == 1 << 20


def test_lt_has_its_own_mebibyte_in_2_11():
    assert workspace_bytes(Blas.CUBLASLT, context(version=(2, 11))) == 1 << 20
    ctx = context(version=(2, 11), environ={"CUBLASLT_WORKSPACE_SIZE": "4096"})
    assert workspace_bytes(Blas.CUBLASLT, ctx) == 4096 << 10


def test_workspaces_last_for_one_op_from_2_15():
    assert workspace_is_cached(Blas.CUBLAS, context(version=(2, 14)))
    assert not workspace_is_cached(Blas.CUBLAS, context(version=(2, 15)))
    kept = context(version=(2, 15), environ={"TORCH_CUBLAS_WORKSPACE_CACHE": "1"})
    assert workspace_is_cached(Blas.CUBLAS, kept)
    assert workspaces_are_unified(kept)


APART = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}


@pytest.mark.parametrize(
    ("bias", "first", "second", "expected"),
    [
        ((5,), (4, 3), (3, 5), Blas.CUBLASLT),
        ((1, 5), (4, 3), (3, 5), Blas.CUBLASLT),
        ((4, 5), (4, 3), (3, 5), Blas.CUBLAS),  # a whole matrix has to be copied into the result first
        ((1,), (4, 3), (3, 5), Blas.CUBLAS),  # not as long as the result is wide
        ((5,), (1, 3), (3, 5), Blas.CUBLAS),  # one row
        ((1,), (4, 3), (3, 1), Blas.CUBLAS),  # one column
    ],
)
def test_addmm_goes_to_lt_when_its_bias_is_one_row(bias, first, second, expected):
    args = (cuda(*bias), cuda(*first), cuda(*second))
    assert blas_library(aten.addmm.default, args, context(environ=APART)) is expected


def test_lt_can_be_switched_off():
    args = (cuda(5), cuda(4, 3), cuda(3, 5))
    ctx = context(environ={**APART, "DISABLE_ADDMM_CUDA_LT": "1"})
    assert blas_library(aten.addmm.default, args, ctx) is Blas.CUBLAS


def test_beta_other_than_one_keeps_addmm_from_lt():
    args = (cuda(5), cuda(4, 3), cuda(3, 5))
    assert blas_libraries(aten.addmm.default, args, {"beta": 2}, context(environ=APART)) == (Blas.CUBLAS,)


def test_one_pool_for_both_libraries_when_unified():
    args = (cuda(5), cuda(4, 3), cuda(3, 5))
    assert blas_libraries(aten.addmm.default, args, {}, context()) == (Blas.CUBLAS,)
    in_2_11 = blas_libraries(aten.addmm.default, args, {}, context(version=(2, 11)))
    assert in_2_11 == (Blas.CUBLAS, Blas.CUBLASLT)


@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "dot"])
def test_plain_products_use_cublas(name):
    shapes = {
        "mm": ((4, 3), (3, 5)),
        "bmm": ((2, 4, 3), (2, 3, 5)),
        "mv": ((4, 3), (3,)),
        "dot": ((3,), (3,)),
    }
    args = tuple(cuda(*shape) for shape in shapes[name])
    assert blas_library(getattr(aten, name).default, args, context()) is Blas.CUBLAS


def test_other_ops_use_none():
    assert blas_library(aten.relu.default, (cuda(4),), context()) is None
    assert blas_library(aten.mm.default, (cuda(0, 3), cuda(3, 5)), context()) is None


def test_transposed_and_padded_operands_are_taken_as_they_are():
    with FAKE:
        transposed = cuda(5, 3).t()
        padded = aten.slice.Tensor(cuda(4, 8), 1, 0, 3)  # strides (8, 1)
    assert ask(aten.mm.default, padded, transposed) is None


def test_an_operand_with_two_wide_strides_is_cloned():
    with FAKE:
        strided = aten.slice.Tensor(cuda(4, 8), 1, 0, 8, 2)  # strides (8, 2): neither is 1
    found = ask(aten.mm.default, strided, cuda(4, 5))
    assert found is not None
    assert found.after == (4 * 4 * 4,)  # the dense copy of 4 x 4 floats


def test_an_expanded_batch_is_no_copy_but_an_expanded_row_is():
    with FAKE:
        batch = cuda(1, 4, 3).expand(2, 4, 3)  # strides (0, 3, 1)
        row = cuda(2, 1, 3).expand(2, 4, 3)  # strides (3, 0, 1): rows overlap
    assert ask(aten.bmm.default, batch, cuda(2, 3, 5)) is None
    found = ask(aten.bmm.default, row, cuda(2, 3, 5))
    assert found is not None
    assert found.after == (2 * 4 * 3 * 4,)
    assert torch.float32.itemsize == 4


def test_a_row_expanded_from_one_is_taken_by_mm_and_copied_by_bmm():
    with FAKE:
        row = cuda(3).expand(1, 3)  # strides (0, 1): contiguous, since a side of one has no stride
        batch = cuda(2, 3).as_strided((2, 1, 3), (3, 0, 1))
    assert ask(aten.mm.default, row, cuda(3, 5)) is None
    found = ask(aten.bmm.default, batch, cuda(2, 3, 5))
    assert found is not None
    assert found.after == (2 * 1 * 3 * 4,)  # prepare_batch_matrix_for_cublas wants strides other than 0


def test_a_conjugated_row_major_operand_is_resolved_first():
    with FAKE:
        conjugated = cuda(4, 4, dtype=torch.complex64).conj()
        other = cuda(4, 4, dtype=torch.complex64)
    found = extras(aten.mm.default, (conjugated, other), {}, other, context())
    assert found is not None
    assert found.after == (4 * 4 * 8,)
    adjoint = conjugated.t()  # column-major: cuBLAS conjugates what it transposes
    assert extras(aten.mm.default, (adjoint, other), {}, other, context()) is None


def test_vectors_expanded_from_one_value_are_made_dense():
    with FAKE:
        ones = cuda(1).expand(3)
        strided = aten.slice.Tensor(cuda(4, 6), 1, 0, 6, 2)
    found = ask(aten.mv.default, cuda(4, 3), ones)
    assert found is not None and found.after == (3 * 4,)
    found = ask(aten.mv.default, strided, cuda(3))
    assert found is not None and found.after == (4 * 3 * 4,)
    assert ask(aten.mv.default, cuda(4, 3), cuda(3)) is None


def test_a_strided_result_is_computed_beside_it():
    with FAKE:
        result = aten.slice.Tensor(cuda(4, 10), 1, 0, 10, 2)
    found = extras(aten.mm.out, (cuda(4, 3), cuda(3, 5)), {"out": result}, result, context())
    assert found is not None and found.after == (4 * 5 * 4,)


def test_a_program_may_prefer_lt():
    first, second = cuda(4, 3), cuda(3, 5)
    prefers = context(prefers_cublaslt=True, environ=APART)
    assert blas_library(aten.mm.default, (first, second), prefers) is Blas.CUBLASLT
    assert blas_library(aten.mm.default, (first, second), context(environ=APART)) is Blas.CUBLAS
    assert blas_library(aten.mv.default, (first, cuda(3)), prefers) is Blas.CUBLAS
    matrices = cuda(4, 4, dtype=torch.complex64), cuda(4, 4, dtype=torch.complex64)
    assert blas_library(aten.mm.default, matrices, prefers) is Blas.CUBLAS


def test_integer_products_have_no_workspace_but_a_handle():
    args = (cuda(32, 16, dtype=torch.int8), cuda(16, 8, dtype=torch.int8))
    assert blas_libraries(aten._int_mm.default, args, {}, context()) == ()
    assert blas_libraries(aten._int_mm.default, args, {}, context(version=(2, 11))) == (Blas.CUBLAS,)


def test_grouped_products_are_one_kernel_on_hopper_and_many_elsewhere():
    # Eight groups: pointers 3 x 8 x 8, shapes 8 x 12, strides 3 x 8 x 8; three maps of 128 bytes for 132 SMs
    tokens, experts = cuda(100, 64, dtype=torch.bfloat16), cuda(8, 64, 32, dtype=torch.bfloat16)
    args = (tokens, experts, cuda(8, dtype=torch.int32))
    hopper = context("H100 SXM")
    found = extras(aten._grouped_mm.default, args, {}, None, hopper)
    assert found is not None
    assert found.after == (192 + 96 + 192, 3 * 132 * 128)
    assert found.error_bytes == found.error_below_bytes == 132 * 128
    assert blas_libraries(aten._grouped_mm.default, args, {}, hopper) == ()
    assert extras(aten._grouped_mm.default, args, {}, None, context()) is None
    assert blas_libraries(aten._grouped_mm.default, args, {}, context()) == (Blas.CUBLAS,)
