"""What CUDA kernels and libraries allocate beyond their outputs: pure functions of arguments, card and torch version.

One module per family of kernels; each that has a table ``RULES`` takes part, there is no list to add it to; in
``RULES_BY_NAME`` are operators that Python registers when a program imports them. Every rule
names the file and function of torch's C++ that it follows; where a closed library decides, the figure is an estimate
and carries an error bar.

Exact, block by block as the C++ takes and gives them back (rules.py): embedding and index backward, deterministic
writes, sorts, topk, scans, reductions, losses, pooling and interpolation, copies. CUB's storage (cub.py) follows CUDA
13.0's headers for each architecture; other releases may have other tiles, which its error bars cover. Estimates:
cuDNN's convolutions, recurrent networks and CTC loss, cuFFT's and cuSOLVER's work areas, cuSPARSE's buffers, Thrust's.

Most kernels allocate nothing but their outputs and need no rule: elementwise ops, dropout (its mask is an
output), gather, scatter, cat, grid sampling, foreach and fused optimisers, gradient scaling. Ops that torch makes of
others below autograd are taken apart instead (fake_impls/apart.py). Known to allocate, and not covered: cuFFT's twiddle
factors and the handles of libraries, which lie outside the allocator; products of two sparse matrices, sparse CSR and
nested tensors; what quantised kernels keep.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.matmul import Blas as Blas
from vramfit.virtual.kernels.matmul import blas_libraries as blas_libraries
from vramfit.virtual.kernels.matmul import cublas_workspace_bytes as cublas_workspace_bytes
from vramfit.virtual.kernels.matmul import cublaslt_workspace_bytes as cublaslt_workspace_bytes
from vramfit.virtual.kernels.matmul import may_use_blas as may_use_blas
from vramfit.virtual.kernels.matmul import workspace_bytes as workspace_bytes
from vramfit.virtual.kernels.matmul import workspace_is_cached as workspace_is_cached
from vramfit.virtual.kernels.matmul import workspaces_are_unified as workspaces_are_unified
from vramfit.virtual.kernels.metas import METAS as METAS
from vramfit.virtual.kernels.rules import Rule
from vramfit.virtual.kernels.sdpa import SdpaBackend as SdpaBackend
from vramfit.virtual.kernels.sdpa import choose_backend as choose_backend
from vramfit.virtual.op_call import Extras as Extras
from vramfit.virtual.op_call import KernelContext as KernelContext
from vramfit.virtual.op_call import OpCall

_RULES: dict[OpOverload, Rule] = {}
_BY_NAME: dict[str, Rule] = {}
for _found in pkgutil.iter_modules(__path__):
    _module = import_module(f"{__name__}.{_found.name}")
    _RULES |= getattr(_module, "RULES", {})
    _BY_NAME |= getattr(_module, "RULES_BY_NAME", {})


def _rule_of(func: OpOverload) -> Rule | None:
    rule = _RULES.get(func)
    return rule if rule is not None or func.namespace == "aten" else _BY_NAME.get(func.name())


def extras(call: OpCall) -> Extras | None:
    """Temporaries that an op's CUDA kernel allocates; None when it allocates nothing beyond its outputs.

    Calls that were measured on the card are answered from its profile.
    """
    profile = call.context.profile
    if profile is not None and (measured := profile.extras(call)) is not None:
        return measured
    rule = _rule_of(call.func)
    return rule(call) if rule is not None else None


def has_rule(func: OpOverload) -> bool:
    """Whether an op has a rule."""
    return _rule_of(func) is not None


def covered() -> frozenset[str]:
    """Names of the op overloads that have a rule."""
    return frozenset(str(func) for func in _RULES)
