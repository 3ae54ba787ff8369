"""Sparse COO tensors on a virtual card: indices and values are counted, and what products and sums hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU

ELEMENTS = 50_000


def sparse(requires_grad: bool = False) -> Tensor:
    indices = torch.zeros(2, ELEMENTS, dtype=torch.int64, device="cuda")
    values = torch.zeros(ELEMENTS, device="cuda", requires_grad=requires_grad)
    return torch.sparse_coo_tensor(indices, values, (1000, 2000), check_invariants=False)


def taken(call: Callable[[Tensor], Any]) -> list[int]:
    """Bytes of the blocks that a call takes, in order."""
    with VirtualGPU("RTX 4090") as gpu:
        source = sparse()
        start = len(gpu.trace.kind)
        call(source)
        end = len(gpu.trace.kind)
    trace = gpu.trace
    return [int(trace.size[row]) for row in range(start, end) if trace.kind[row] == EventKind.ALLOC]


def test_coalescing_holds_three_index_arrays_beside_its_result() -> None:
    assert taken(lambda s: s.coalesce()) == [400_000, 400_000, 400_000, 200_000, 800_000]


def test_scaling_makes_values_alone() -> None:
    assert taken(lambda s: s * 2) == [200_000]


def test_sums_join_both_sets_of_elements() -> None:
    assert taken(lambda s: s + s) == [400_000, 1_600_000]
    assert taken(lambda s: torch.zeros(1000, 2000, device="cuda") + s) == [8_000_000, 8_000_000]


def test_products_with_a_dense_matrix_count_rows_and_narrow_indices() -> None:
    blocks = taken(lambda s: s @ torch.zeros(2000, 64, device="cuda"))
    dense, result = 2000 * 64 * 4, 1000 * 64 * 4
    assert blocks[:2] == [dense, result]  # zeros to add to
    assert blocks[-4:] == [1001 * 4, 200_000, dense, result]


def test_gradients_reach_values_and_dense_matrices() -> None:
    with VirtualGPU("RTX 4090"):
        values = torch.zeros(ELEMENTS, device="cuda", requires_grad=True)
        indices = torch.zeros(2, ELEMENTS, dtype=torch.int64, device="cuda")
        matrix = torch.zeros(2000, 8, device="cuda", requires_grad=True)
        source = torch.sparse_coo_tensor(indices, values, (1000, 2000), check_invariants=False)
        torch.sparse.mm(source, matrix).sum().backward()
        assert values.grad is not None and values.grad.shape == (ELEMENTS,)
        assert matrix.grad is not None and matrix.grad.shape == (2000, 8)


def test_what_is_not_described_is_named() -> None:
    with (
        VirtualGPU("RTX 4090"),
        pytest.raises(NotImplementedError, match=r"_sparse_sparse_matmul.* of sparse tensors"),
    ):
        torch.sparse.mm(sparse(), sparse())


def test_dense_tensors_become_sparse_in_some_dimensions() -> None:
    with VirtualGPU("RTX 4090"):
        rows = torch.eye(4, device="cuda").reshape(4, 2, 2).to_sparse(1)
        assert (rows.sparse_dim(), rows.dense_dim(), rows._values().shape) == (1, 2, (4, 2, 2))


def test_expanded_tensors_of_the_host_keep_their_values() -> None:
    with VirtualGPU("RTX 4090"):
        small = torch.arange(3.0).expand(4, 3).cuda()
        assert small.cpu().tolist() == [[0.0, 1.0, 2.0]] * 4


def test_sparse_gradients_of_two_uses_are_summed() -> None:
    with VirtualGPU("RTX 4090"):
        table = torch.nn.Embedding(100, 8, sparse=True).cuda()
        rows = torch.zeros(3, dtype=torch.int64, device="cuda")
        (table(rows).sum() + table(rows).sum()).backward()
        assert table.weight.grad is not None and table.weight.grad._nnz() == 6


def test_a_mask_of_rows_takes_rows() -> None:
    with VirtualGPU("RTX 4090"):
        rows = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
        mask = torch.sparse_coo_tensor(
            rows, torch.zeros(3, 8, device="cuda"), (10, 8), check_invariants=False
        )
        assert torch.zeros(10, 8, device="cuda").sparse_mask(mask)._values().shape == (3, 8)


def test_copies_hold_as_many_elements() -> None:
    with VirtualGPU("RTX 4090"):
        source = sparse()
        copies = (source.clone(), source.half(), source.t(), source.transpose(0, 1), source.cpu())
        assert [copy._nnz() for copy in copies] == [source._nnz()] * len(copies)
        assert [copy.shape for copy in copies[2:4]] == [source.shape[::-1]] * 2
        assert copies[1].dtype == torch.float16 and copies[-1].device.type == "cpu"
        with pytest.raises(RuntimeError, match="transposed dimensions must be sparse"):
            torch.eye(4, device="cuda").to_sparse(1).t()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch.optim.Adagrad
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_step_by_sparse_gradients(optimizer: type[torch.optim.Optimizer]) -> None:
    with VirtualGPU("RTX 4090") as gpu:
        table = torch.nn.Embedding(100, 8, sparse=True).cuda()
        stepping = optimizer(table.parameters(), lr=0.1)  # type: ignore[call-arg]
        table(torch.zeros(3, dtype=torch.int64, device="cuda")).sum().backward()
        stepping.step()
        assert table.weight.grad is not None and table.weight.grad._nnz() == 3
    assert not [one for one in gpu.run.warnings if one.code == "op-without-rule"]


def test_a_sparse_tensor_is_added_to_a_dense_one_in_place() -> None:
    """By flat positions, which a second sparse dimension has to be worked out for."""

    def add(source: Tensor) -> None:
        dense.add_(source)

    with VirtualGPU("RTX 4090"):
        dense = torch.zeros(1000, 2000, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        source = sparse()
        held = torch.cuda.memory_allocated() - before
        add(source)
        assert torch.cuda.memory_allocated() - before == held
        flat = 8 * ELEMENTS + -8 * ELEMENTS % 512
        assert torch.cuda.max_memory_allocated() - before - held == flat
