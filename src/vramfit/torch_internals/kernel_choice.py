"""What decides which kernel runs: flags of the libraries, the order of attention's backends, fused functions."""

from __future__ import annotations

from functools import partial
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals.names import Feature

_CALIBRATION = Feature("calibrating fused products of matrices")
_ROWS = Feature("chunked inference of attention")
_FEATURE = Feature("taking the kernels that the card would take")

addmm_activation: Any = _CALIBRATION.find("torch._addmm_activation")
BlasBackend: Any = _FEATURE.find("torch._C._BlasBackend")
LinalgBackend: Any = _FEATURE.find("torch._C._LinalgBackend")
fp32_precision: Any = _FEATURE.find("torch._C._get_fp32_precision_getter")
fused_sdp_choice: Any = _ROWS.find("torch._fused_sdp_choice")
get_cudnn_enabled: Any = _FEATURE.find("torch._C._get_cudnn_enabled")
get_sdp_priority_order: Any = _FEATURE.find("torch._C._get_sdp_priority_order")
int_mm: Any = _CALIBRATION.find("torch._int_mm")
scaled_mm: Any = _CALIBRATION.find("torch._scaled_mm")
softmax: Any = _FEATURE.find("torch._softmax")

_PREFERENCES: tuple[tuple[Any, Any], ...] = tuple(
    tuple(_FEATURE.find(f"torch._C._{verb}_{library}_preferred_backend") for verb in ("get", "set"))
    for library in ("blas", "linalg")
)

_SWITCHES: tuple[Any, ...] = tuple(
    _FEATURE.find(f"torch._C._get_{name}")
    for name in (
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "deterministic_algorithms",
        "deterministic_algorithms_warn_only",
        "flash_sdp_enabled",
        "mem_efficient_sdp_enabled",
        "math_sdp_enabled",
        "cudnn_sdp_enabled",
        "math_sdp_allow_fp16_bf16_reduction",
        "sdp_priority_order",
    )
)


def takes_tf32(kind: str) -> bool:
    """Whether float32 is computed in TF32, by ``matmul`` or ``conv``."""
    return bool(fp32_precision) and bool(fp32_precision("cuda", kind) == "tf32")


def attention_order() -> tuple[int, ...]:
    """The order in which attention's backends are tried; empty where torch does not say."""
    return tuple(get_sdp_priority_order()) if get_sdp_priority_order else ()


def keep_preferred_libraries(patches: PatchStack) -> None:
    """Put back at the undo which libraries a CUDA build prefers now: there torch itself keeps that, for the process."""
    for get, put in _PREFERENCES:
        if get and put:
            patches.call(partial(put, get()))


def is_cublaslt(backend: Any) -> bool:
    """Whether a preferred library of matrix products is cuBLASLt."""
    return bool(BlasBackend) and bool(backend == BlasBackend.Cublaslt)


def switches() -> tuple[Any, ...]:
    """What ``torch.backends`` is set to, by the functions behind it: it is read for every op, and they are quicker."""
    return (
        *[switch() for switch in _SWITCHES if switch],
        takes_tf32("matmul"),
        takes_tf32("conv"),
    )
