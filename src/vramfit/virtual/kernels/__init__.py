"""What CUDA kernels and libraries allocate beyond their outputs: pure functions of arguments, card and torch
version.

One module per family of kernels. Every rule names the file and function of torch's C++ that it follows;
where a closed library decides, the figure is an estimate and carries an error bar.

Most kernels allocate nothing but their outputs and need no rule: elementwise ops, dropout (its mask is an
output), gather, scatter, cat, pooling, interpolation, foreach and fused optimisers, gradient scaling. Known
to allocate, and not covered: FFT plans, linear algebra (cuSOLVER, MAGMA), CTC loss, sparse and nested
tensors, histograms.
"""

from vramfit.virtual.kernels.context import Extras, KernelContext
from vramfit.virtual.kernels.matmul import (
    Blas,
    blas_libraries,
    blas_library,
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    workspace_bytes,
    workspace_is_cached,
    workspaces_are_unified,
)
from vramfit.virtual.kernels.metas import METAS
from vramfit.virtual.kernels.registry import covered, extras
from vramfit.virtual.kernels.sdpa import SdpaBackend, choose_backend

__all__ = [
    "METAS",
    "Blas",
    "Extras",
    "KernelContext",
    "SdpaBackend",
    "blas_libraries",
    "blas_library",
    "choose_backend",
    "covered",
    "cublas_workspace_bytes",
    "cublaslt_workspace_bytes",
    "extras",
    "workspace_bytes",
    "workspace_is_cached",
    "workspaces_are_unified",
]
