"""Running sums, products and extremes: cumsum, cumprod, logcumsumexp, cummax, cummin.

aten/src/ATen/native/cuda/ScanKernels.cpp and ScanUtils.cuh (``scan_dim``, ``scan_dim_with_indices``): one long row
goes through CUB, several rows are scanned by kernels that need no storage. native/ReduceOps.cpp
(``impl_func_cum_ops``) converts the input to the type of the result first.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import scan_bytes, scan_error
from vramfit.virtual.kernels.rules import Rule, Scratch, after_outputs, table
from vramfit.virtual.op_call import KernelContext, OpCall


def scan_row(scratch: Scratch, count: int, dtype: torch.dtype, ctx: KernelContext) -> None:
    """Storage of a scan over one row of numbers of a type.

    In deterministic mode, sums of floating-point numbers keep one sum for each block instead
    (cub.cuh, ``inclusive_deterministic_scan``).
    """
    if ctx.deterministic and (dtype.is_floating_point or dtype.is_complex):
        scratch.use(ctx.spec.sm_count * dtype.itemsize)
        return
    storage = scan_bytes(count, dtype.itemsize)
    scratch.use(storage)
    scratch.doubt(scan_error(storage))


@after_outputs
def _scan(call: OpCall, scratch: Scratch) -> None:
    """Running sums and products."""
    source, dim = call.args[0], call.argument(1, "dim", -1)
    if not source.numel() or not source.dim():
        return
    wanted = call.out.dtype
    if source.dtype != wanted:
        scratch.take(source.numel() * wanted.itemsize)  # keeps the strides of a dense source
    scratch.copy(call.out)
    scratch.take(0 if source.is_contiguous() else source.numel() * wanted.itemsize)
    if source.numel() == source.shape[dim]:
        scan_row(scratch, source.numel(), wanted, call.context)


@after_outputs
def _with_indices(call: OpCall, scratch: Scratch) -> None:
    """``cummax``, ``cummin``: a contiguous copy; no library (``scan_dim_with_indices``)."""
    scratch.copy(call.args[0])


RULES: dict[OpOverload, Rule] = table(
    {
        ("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "cumsum_", "cumprod_"): _scan,
        ("cummax", "cummin", "_cummax_helper", "_cummin_helper"): _with_indices,
    }
)
