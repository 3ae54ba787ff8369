"""Simulated seconds of one op: the larger of its arithmetic and its memory traffic, plus a launch.

FLOPs come from ``torch.utils.flop_counter`` (matrix products, convolutions, attention), bytes from the tensors that
the op reads and writes. The rates (`Rates`) are those of a profile, as measured on the card; without one they come from
the data sheet, times an efficiency that real kernels reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import Rates
from vramfit.torch_internals.kernel_choice import takes_tf32
from vramfit.virtual.op_call import OpCall

# What large, well-shaped kernels reach of the data sheet's figures (dense matmul and device copy).
COMPUTE_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.8
LAUNCH_SECONDS = 4e-6
# Two channels of DDR4-3200, 2 x 8 bytes x 3.2 GT/s (JESD79-4): what desktops have at least, servers a multiple.
HOST_BANDWIDTH = 51.2e9

_DTYPE_PEAKS = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}

# They take memory, and run nothing.
_WITHOUT_KERNEL = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.empty_permuted, torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
}

# They read of their first tensor as much as they give, and they write into it as much as they are given: a few rows of
# a large table. Counted as a whole, a step of a cache of keys and values would take seconds.
_READ_ROWS = {torch.ops.aten.index_select, torch.ops.aten.index}
_WRITE_ROWS = {torch.ops.aten.index_copy_, torch.ops.aten.index_fill_, torch.ops.aten.index_put_}

_UNMEASURED = Rates()


def seconds(call: OpCall, spec: GpuSpec, rates: Rates | None = None) -> float:
    """Estimated seconds of one op, whose results are known, on a card."""
    packet, args, kwargs, out = call.func._overloadpacket, call.args, call.kwargs, call.out
    if packet in _WITHOUT_KERNEL:
        return 0.0
    rates = rates or _UNMEASURED
    launch = LAUNCH_SECONDS if rates.launch_seconds is None else rates.launch_seconds
    if packet in _READ_ROWS:
        moved = _nbytes(args[1:]) + 2 * _nbytes(out)
    elif packet in _WRITE_ROWS:
        moved = 2 * _nbytes(args[1:])
    else:
        moved = _nbytes(args) + _nbytes(tuple(kwargs.values())) + _nbytes(out)
    time = moved / (rates.bandwidth or spec.bandwidth * BANDWIDTH_EFFICIENCY)
    count = flop_registry.get(packet)
    if count is not None:
        try:
            flops = count(*args, **kwargs, out_val=out)
        except (TypeError, AssertionError, ValueError, IndexError):
            flops = 0  # a form of the op that the counter does not know: its traffic still counts
        if flops:
            time = max(time, flops / flops_per_second(spec, _dtype(args), rates))
    return time + launch


def traffic_seconds(moved: int, spec: GpuSpec, rates: Rates | None = None) -> float:
    """Estimated seconds of a kernel that does little arithmetic and reads and writes `moved` bytes."""
    rates = rates or _UNMEASURED
    launch = LAUNCH_SECONDS if rates.launch_seconds is None else rates.launch_seconds
    return moved / (rates.bandwidth or spec.bandwidth * BANDWIDTH_EFFICIENCY) + launch


def link_seconds(nbytes: int, spec: GpuSpec, rates: Rates | None, *, upwards: bool, pinned: bool) -> float:
    """Estimated seconds of a copy between the host and a card.

    What is not page-locked passes through a page-locked buffer of the driver's (M. Harris, "How to Optimize Data
    Transfers in CUDA C/C++", NVIDIA 2012). That the host's copy and the link's come one after another, and that the
    host's is as quick as its memory, is assumed, where nothing was measured: a driver may let them overlap.

    Args:
        upwards: whether it goes to the card.
        pinned: whether the host's memory is page-locked.
    """
    measured = {} if rates is None else rates.to_card if upwards else rates.to_host
    known = measured.get("pinned" if pinned else "pageable")
    if known:
        return nbytes / known
    through_buffer = 0.0 if pinned else 2 * nbytes / (HOST_BANDWIDTH * BANDWIDTH_EFFICIENCY)
    return nbytes / spec.host_link + through_buffer


def host_seconds(moved: Any) -> float:
    """Estimated seconds of an op on the host that does little arithmetic.

    Args:
        moved: the tensors that it reads and writes, nested in any way; those that it does both with appear twice.
    """
    return _nbytes(moved) / (HOST_BANDWIDTH * BANDWIDTH_EFFICIENCY)


def flops_per_second(spec: GpuSpec, dtype: torch.dtype | None, rates: Rates = _UNMEASURED) -> float:
    """FLOP/s that a large matrix product reaches."""
    name = _peak_name(spec, dtype)
    peaks = spec.peak_flops
    return rates.flops.get(name) or (peaks.get(name) or peaks["float32"]) * COMPUTE_EFFICIENCY


def _peak_name(spec: GpuSpec, dtype: torch.dtype | None) -> str:
    """The name of a card's rate for a dtype; TF32 where the program allows it for float32."""
    name = _DTYPE_PEAKS.get(dtype, "float32") if dtype is not None else "float32"
    if name == "float32" and "tf32" in spec.peak_flops and takes_tf32("matmul"):
        name = "tf32"
    return name


def _nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, (list, tuple)):
        return sum(_nbytes(item) for item in tree)
    if isinstance(tree, dict):
        return sum(_nbytes(item) for item in tree.values())
    return 0


def _dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
    return None
