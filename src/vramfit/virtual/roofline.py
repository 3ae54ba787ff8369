"""Simulated seconds of one op: the larger of its arithmetic and its memory traffic, plus a launch.

FLOPs come from ``torch.utils.flop_counter`` (matrix products, convolutions, attention), bytes from the tensors that
the op reads and writes, the rates from the card's data sheet times an efficiency that real kernels reach. These are
estimates: no card has been asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vramfit.gpus import GpuSpec

# What large, well-shaped kernels reach of the data sheet's figures (dense matmul and device copy).
COMPUTE_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.8
LAUNCH_SECONDS = 4e-6

_DTYPE_PEAKS = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}


def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, spec: GpuSpec) -> float:
    """Estimated seconds of one op on a card.

    Args:
        func: the op overload.
        args: its arguments (fake tensors carry the shapes).
        kwargs: its keyword arguments.
        out: its results.
        spec: the card.
    """
    moved = _nbytes(args) + _nbytes(tuple(kwargs.values())) + _nbytes(out)
    time = moved / (spec.bandwidth * BANDWIDTH_EFFICIENCY)
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        try:
            flops = count(*args, **kwargs, out_val=out)
        except (TypeError, AssertionError, ValueError, IndexError):
            flops = 0  # a form of the op that the counter does not know: its traffic still counts
        if flops:
            time = max(time, flops / (peak_flops(spec, _dtype(args)) * COMPUTE_EFFICIENCY))
    return time + LAUNCH_SECONDS


def peak_flops(spec: GpuSpec, dtype: torch.dtype | None) -> float:
    """Dense peak of a card for a dtype, in FLOP/s; TF32 where the program allows it for float32."""
    peaks = spec.peak_flops
    name = _DTYPE_PEAKS.get(dtype, "float32") if dtype is not None else "float32"
    if name == "float32" and "tf32" in peaks and torch.get_float32_matmul_precision() != "highest":
        name = "tf32"
    return peaks.get(name) or peaks["float32"]


def _nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, (list, tuple)):
        return sum(_nbytes(item) for item in tree)
    return 0


def _dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
    return None
