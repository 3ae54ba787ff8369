"""Optimisers and gradient scaling: per-tensor partial norms; everything else works in place.

aten/src/ATen/native/cuda/ForeachReduceOp.cu (``foreach_tensor_norm_cuda``, ``foreach_tensor_max_cuda``). The
fused optimisers (FusedAdamKernel.cu, FusedSgdKernel.cu, FusedAdagradKernel.cu), ``multi_tensor_apply`` and
``_amp_foreach_non_finite_check_and_unscale_`` (AmpKernels.cu) pass addresses as kernel arguments and
allocate nothing.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, ceil_div, table, workspace
from vramfit.virtual.op_call import Extras, OpCall

_CHUNK = 65_536  # MultiTensorApply.cuh, kChunkSize


def _chunks(tensors: list[torch.Tensor]) -> int:
    return len(tensors) * max((ceil_div(t.numel(), _CHUNK) for t in tensors), default=0)


def _foreach_norm(call: OpCall) -> Extras | None:
    """Partial norms: a row for every tensor, as long as the largest tensor has chunks of 65,536 elements.

    Only for tensors of one dtype and device that are dense (``can_use_fast_route``); others are normed one
    by one.
    """
    tensors = call.args[0]
    if not tensors or len({(t.dtype, t.device) for t in tensors}) != 1:
        return None
    return workspace(_chunks(tensors) * max(4, tensors[0].element_size()))


def _foreach_max(call: OpCall) -> Extras | None:
    """``_foreach_max``: the same, in the tensors' own type."""
    tensors = call.args[0]
    if not tensors or len({(t.dtype, t.device) for t in tensors}) != 1:
        return None
    return workspace(_chunks(tensors) * tensors[0].element_size())


RULES: dict[OpOverload, Rule] = table(
    {
        ("_foreach_norm.Scalar", "_foreach_powsum.Scalar"): _foreach_norm,
        "_foreach_max": _foreach_max,
    }
)
