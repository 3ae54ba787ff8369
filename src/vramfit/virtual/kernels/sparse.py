"""Products of a sparse and a dense matrix: narrow indices and dense stand-ins for cuSPARSE.

aten/src/ATen/native/sparse/cuda/SparseCUDABlas.cpp (``csrmm2``) and SparseCUDATensorMath.cu
(``s_addmm_out_sparse_dense_cuda``). cuSPARSE's own buffer (``cusparseSpMM_bufferSize``) is closed: an error bar.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, Scratch, nbytes, sequence, table
from vramfit.virtual.op_call import Extras, OpCall


def _product(call: OpCall) -> Extras | None:
    """``_sparse_addmm(self, sparse, dense)``: the sparse matrix coalesced, its rows counted, indices as int32."""
    sparse, dense = call.args[1:3]
    if sparse.layout is torch.sparse_csr:
        return _compressed_product(sparse, dense)
    if sparse.layout is not torch.sparse_coo:
        return None
    indices, values = sparse._indices(), sparse._values()
    count = values.shape[0]
    scratch = Scratch()
    if not sparse.is_coalesced():
        sorting = [scratch.take(count * 8) for _ in range(3)]
        scratch.take(nbytes(values))
        scratch.take(nbytes(indices))
        scratch.give(*reversed(sorting))
    scratch.take((sparse.shape[0] + 1) * 4)
    scratch.take(count * 4)
    scratch.copy(dense.t())
    scratch.take(nbytes(call.out))  # the result column by column, copied at last
    scratch.doubt((nbytes(call.out) + count * 8, 0))
    return sequence(after=scratch)


def _compressed_product(sparse: torch.Tensor, dense: torch.Tensor) -> Extras | None:
    """``spmm`` and ``addmv_out_sparse_csr`` (native/sparse/cuda/SparseBlasImpl.cpp).

    A dense factor is copied if its strides are none that cuSPARSE takes; cuSPARSE's own buffer is an estimate.
    """
    scratch = Scratch()
    scratch.take(0 if _suits_cusparse(dense) else nbytes(dense))
    scratch.doubt(((sparse.shape[0] + 1 + sparse._nnz()) * 8, 0))
    return sequence(after=scratch)


def _suits_cusparse(dense: torch.Tensor) -> bool:
    """Whether a vector is dense, or a matrix lies row after row or column after column, perhaps with gaps between."""
    if dense.dim() == 1:
        return dense.shape[0] < 2 or dense.stride(0) == 1
    (rows, columns), (down, across) = dense.shape, dense.stride()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


RULES: dict[OpOverload, Rule] = table({"_sparse_addmm": _product})
