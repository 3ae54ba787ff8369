"""CSR and CSC tensors on a virtual card: three parts each, and products with dense matrices as torch makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

ROWS, COLUMNS, ELEMENTS = 1000, 2000, 50_000
PARTS = 8_192 + 400_384 + 200_192  # 1001 and 50,000 indices of 8 bytes, 50,000 values of 4, rounded up to 512
ZEROS, RESULT = 64 * ROWS * 4, 64 * ROWS * 4

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def on_host(layout: torch.layout = torch.sparse_csr) -> Tensor:
    compressed = torch.linspace(0, ELEMENTS, (ROWS if layout is torch.sparse_csr else COLUMNS) + 1).long()
    plain = torch.arange(ELEMENTS) % 25
    return torch.sparse_compressed_tensor(
        compressed, plain, torch.ones(ELEMENTS), (ROWS, COLUMNS), layout=layout, check_invariants=False
    )


def test_a_copy_to_the_card_takes_its_three_parts_and_gives_them_back(gpu: VirtualGPU) -> None:
    matrix = on_host().to("cuda")
    assert (matrix.layout, matrix.device.type, matrix.shape) == (torch.sparse_csr, "cuda", (ROWS, COLUMNS))
    assert matrix._nnz() == ELEMENTS and matrix.crow_indices().shape == (ROWS + 1,)
    assert torch.cuda.memory_allocated() == PARTS
    copy = matrix.clone()
    assert torch.cuda.memory_allocated() == 2 * PARTS
    back = matrix.cpu()
    assert type(back) is Tensor and back.layout is torch.sparse_csr and back.device.type == "cpu"
    del matrix, copy
    assert torch.cuda.memory_allocated() == 0
    made = torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device="cuda")
    assert made.values().tolist() == [1.0, 2.0] and torch.cuda.memory_allocated() == 3 * 512
    assert on_host(torch.sparse_csc).cuda().ccol_indices().shape == (COLUMNS + 1,)


def test_a_product_holds_zeros_and_its_result(gpu: VirtualGPU) -> None:
    matrix, dense = on_host().cuda(), torch.ones(COLUMNS, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    for multiply in (torch.matmul, torch.sparse.mm):
        torch.cuda.reset_peak_memory_stats()
        out = multiply(matrix, dense)
        assert (out.shape, out.layout) == ((ROWS, 64), torch.strided)
        assert torch.cuda.max_memory_allocated() - before == ZEROS + RESULT
        assert torch.cuda.memory_allocated() - before == RESULT
        del out
    assert (matrix @ dense[:, 0]).shape == (ROWS,)
    assert torch.addmm(torch.zeros(ROWS, 64, device="cuda"), matrix, dense).shape == (ROWS, 64)


def test_the_gradient_of_the_dense_matrix_is_a_product_with_the_transposed(gpu: VirtualGPU) -> None:
    matrix, dense = on_host().cuda(), torch.ones(COLUMNS, 512, device="cuda", requires_grad=True)
    out = matrix @ dense
    gradient = torch.ones_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    result = COLUMNS * 512 * 4
    assert dense.grad is not None and dense.grad.shape == dense.shape
    # Its CSC form becomes CSR: new row counts, indices and values; the indices are one of two rows that were sorted.
    by_rows = 16_384 + 800_256 + 200_192
    assert torch.cuda.max_memory_allocated() - before == by_rows + 2 * result


def test_a_matrix_by_columns_is_turned_as_torch_turns_it(gpu: VirtualGPU) -> None:
    """native/TensorConversions.cpp, ``sparse_compressed_to_flipped``; the result comes before it, but for ``mm``."""
    turning = [
        ("_convert_indices_from_csr_to_coo", 16 * ELEMENTS),
        ("div", 8 * ELEMENTS),
        ("mul", 8 * ELEMENTS),
        ("arange", 8 * ELEMENTS),
        ("index_select", 16 * ELEMENTS),
        ("index_select", 4 * ELEMENTS),
        ("_convert_indices_from_coo_to_csr", 8 * (ROWS + 1)),
        ("zeros_like", 8 * (ROWS + 1)),
        ("sub", 8 * ROWS),
    ]
    first = [("add", 8 * COLUMNS), ("empty_like", 8 * (COLUMNS + 1)), *turning]
    zeros, result, vector = ("new_zeros", RESULT), ("_sparse_addmm", RESULT), ("_sparse_addmm", 4 * ROWS)
    matrix, dense = on_host(torch.sparse_csc).cuda(), torch.ones(COLUMNS, 64, device="cuda")
    start, vectors = torch.zeros(ROWS, 64, device="cuda"), dense.t().contiguous()
    small = {
        "_to_copy",
        "cumsum",
        "sort",
    }  # one number of the batch, and what a sort of these keys takes anyway

    def taken(multiply: Callable[[], Tensor]) -> list[tuple[str, int]]:
        before = len(gpu.trace)
        held = torch.cuda.memory_allocated()
        product = multiply()
        assert torch.cuda.memory_allocated() - held == -(-product.nbytes // 512) * 512
        trace = gpu.trace
        rows = [row for row in range(before, len(trace)) if trace.kind[row] == EventKind.ALLOC]
        found = [(trace.ops[trace.op[row]].removeprefix("aten."), int(trace.size[row])) for row in rows]
        return [(name, size) for name, size in found if name not in small]

    assert taken(lambda: matrix @ dense) == [*first, zeros, result]
    assert taken(lambda: torch.addmm(start, matrix, dense)) == [result, *first]
    assert taken(lambda: matrix @ vectors[0]) == [vector, *first]
    # A factor that cuSPARSE cannot take as it lies is copied.
    strided = torch.ones(COLUMNS, 128, device="cuda")[:, ::2]
    copied = taken(lambda: matrix @ strided)
    assert copied == [*first, zeros, result, ("_sparse_addmm", COLUMNS * 64 * 4)]
    assert taken(lambda: matrix @ dense[:, 0]) == [vector, *first, ("_sparse_addmm", 4 * COLUMNS)]


def test_products_without_a_rule_are_named(gpu: VirtualGPU) -> None:
    matrix = on_host().cuda()
    with pytest.raises(NotImplementedError, match=r"strided and .*sparse_csr"):
        torch.ones(4, ROWS, device="cuda") @ matrix
    with pytest.raises(NotImplementedError, match=r"sparse_csr and .*sparse_c"):
        torch.sparse.mm(matrix, matrix.t())
