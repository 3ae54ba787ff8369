"""What is asked of cuDNN and what it answers: plain values that pass between two processes and lie in a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from vramfit.gpus import GpuSpec


class ConvPass(Enum):
    """What a convolution computes, by the name of cuDNN's operation (``cudnnBackendDescriptorType_t``)."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward-data"
    BACKWARD_FILTER = "backward-filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A tensor as cuDNN sees it.

    Attributes:
        dims: batch, channels and pixels; of filters channels made, channels read by a group, and their pixels.
        strides: in elements.
        alignment: bytes that its address is a multiple of, at most 32.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvQuestion:
    """Which plans cuDNN would give torch for a convolution.

    Attributes:
        kind: what is computed.
        dtype: of all tensors, as torch names it without ``torch.``.
        x: what the filters read, or its gradient.
        y: what they make, or its gradient.
        w: the filters, or their gradient.
        padding, stride, dilation: one value for each dimension of pixels.
        tf32: float32 may run on tensor cores.
        deterministic: plans whose results may differ from run to run are passed over.
        mode_b: the heuristics of mode B (``TORCH_CUDNN_USE_HEURISTIC_MODE_B``) instead of the instant ones.
        most: how many plans to give at most; 0 for all, fallbacks included, as benchmark mode tries them.
        any_clock: cards with other clocks are asked about as well.
    """

    kind: ConvPass
    dtype: str
    x: TensorShape
    y: TensorShape
    w: TensorShape
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    tf32: bool = True
    deterministic: bool = False
    mode_b: bool = False
    most: int = 1
    any_clock: bool = False

    def with_most(self, most: int) -> ConvQuestion:
        """The same question for more plans."""
        return replace(self, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPlan:
    """One plan of cuDNN.

    Attributes:
        workspace: bytes that it takes while it runs.
        engine: number of the engine.
    """

    workspace: int
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvAnswer:
    """The plans for a convolution.

    Attributes:
        plans: in the order in which torch tries them; empty where cuDNN has none.
        at_other_clocks: bytes of the first plan on such cards with other clocks, where that was asked.
    """

    plans: tuple[ConvPlan, ...] = ()
    at_other_clocks: tuple[int, ...] = ()


class AttentionPass(Enum):
    """What attention computes."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuestion:
    """What cuDNN would take for scaled dot-product attention.

    Attributes:
        kind: the output, or the gradients of all three inputs.
        dtype: of inputs and outputs, as torch names it without ``torch.``.
        query: shape (batch, heads, queries, head size).
        key: shape (batch, heads of keys, keys, head size).
        value: shape (batch, heads of keys, keys, head size of values).
        out: shape (batch, heads, queries, head size of values).
        grad: gradient of the output, shaped like it; None in the forward pass.
        bias: the additive mask, shape (batch, 1 or heads, queries, keys); None without one.
        bias_dtype: of the mask.
        causal: queries see the keys up to their own place alone.
        dropout: share of the weights that are dropped.
        stats: the logarithms of the sums of the softmax are an output as well.
    """

    kind: AttentionPass
    dtype: str
    query: TensorShape
    key: TensorShape
    value: TensorShape
    out: TensorShape
    grad: TensorShape | None = None
    bias: TensorShape | None = None
    bias_dtype: str = ""
    causal: bool = False
    dropout: float = 0.0
    stats: bool = True


_CTAS_PER_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (11, 0): 24, (12, 0): 24, (12, 1): 24}
"""Resident blocks of an SM where they are not 32 (CUDA C++ Programming Guide, technical specifications)."""


def device_properties(spec: GpuSpec, *, clock_share: float = 1.0) -> dict[str, Any]:
    """A card as cuDNN's device-properties descriptor takes it in JSON.

    The keys are those of OpenXLA's ``xla/backends/gpu/target_config/cudnn_device_props.cc``; cuDNN 9.28 wants
    ``memoryBusWidth`` as well. Clocks are in kHz, the memory's as CUDA counts it.

    Args:
        spec: the card.
        clock_share: the clock of its SMs as a share of the boost clock, at which the catalogue has it.
    """
    major, minor = spec.compute_capability
    return {
        "deviceVer": major * 100 + minor * 10,
        "multiProcessorCount": spec.sm_count,
        "smCountOrigin": 0,
        "warpSize": spec.warp_size,
        "maxSharedMemoryPerBlock": spec.shared_memory_per_block,
        "maxSharedMemoryPerBlockOptin": spec.shared_memory_per_block_optin,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
        "maxRegistersPerSM": spec.registers_per_sm,
        "maxCtasPerSM": _CTAS_PER_SM.get(spec.compute_capability, 32),
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": spec.max_threads_per_sm,
        "regsPerBlock": 65_536,
        "totalGlobalMem": spec.total_bytes,
        "smClockRateKHz": round(spec.boost_clock * clock_share / 1e3),
        "memClockRateKHz": round(spec.memory_clock / 1e3),
        "memoryBusWidth": spec.memory_bus_bits,
        "l2CacheSize": spec.l2_bytes,
        "maxBlockSize": [1024, 1024, 64],
        "maxGridSize": [2_147_483_647, 65_535, 65_535],
        "supportCoopLaunch": 1,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "cudaDeviceId": 0,
        "driverVer": 12_090,
        "deviceName": spec.vendor_name,
    }
