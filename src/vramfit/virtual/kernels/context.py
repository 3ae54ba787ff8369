"""What decides how a CUDA kernel behaves besides its arguments, and what a kernel allocates beyond its
outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vramfit.gpus import GpuSpec

if TYPE_CHECKING:
    from vramfit.virtual.kernels.measured import MeasuredTable

# cuDNN that the default wheel of each torch release asks for (its `nvidia-cudnn-cu13` requirement on PyPI),
# in cuDNN's own numbering: 9.19.0 is 91900. Later releases count as the last one known.
_CUDNN_OF_WHEEL = {(2, 11): 91900, (2, 12): 92000}
_CUDNN_OF_NEWER = 92000


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext:
    """The card, the torch release and the switches that kernels ask.

    Attributes:
        spec: the card.
        capability: its compute capability, ``(major, minor)``.
        torch_version: ``(2, 13)``.
        cudnn_enabled: ``torch.backends.cudnn.enabled``.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark``.
        deterministic: ``torch.use_deterministic_algorithms(True)`` (not in its warn-only form).
        allow_tf32: float32 matrix products may use TF32.
        prefers_cublaslt: the program prefers cuBLASLt to cuBLAS
            (``torch.backends.cuda.preferred_blas_library``, ``TORCH_BLAS_PREFER_CUBLASLT``).
        cudnn_deterministic: ``torch.backends.cudnn.deterministic``, or deterministic algorithms even in their
            warn-only form.
        cudnn_tf32: float32 convolutions may use TF32 (``torch.backends.cudnn.conv.fp32_precision``).
        conv_benchmark_empties_cache: the search of benchmark mode ends with ``torch.cuda.empty_cache()``
            (``torch._C._cudnn_set_conv_benchmark_empty_cache``).
        environ: the program's environment variables.
        flash_sdp: flash attention may be chosen (``torch.backends.cuda.flash_sdp_enabled()``).
        mem_efficient_sdp: memory-efficient attention may be chosen.
        cudnn_sdp: cuDNN attention may be chosen.
        math_sdp: the math fallback may be chosen.
        half_reduction_math_sdp: the math fallback computes in half precision
            (``torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()``), off by default.
        sdp_priority: the order set by ``sdpa_kernel(..., set_priority=True)`` as ``SDPBackend`` numbers, or
            None.
        cudnn_version: cuDNN as ``torch.backends.cudnn.version()`` numbers it; 0 for that of the default
            wheel.
        cuda_version: CUDA that torch was built with, ``(13, 0)`` in the default wheels since 2.11.
        searched: convolutions for which benchmark mode has searched an algorithm already; grows.
        profile: calls that were measured on the card, which go before any rule; None without a profile.
    """

    spec: GpuSpec
    capability: tuple[int, int]
    torch_version: tuple[int, int]
    cudnn_enabled: bool = True
    cudnn_benchmark: bool = False
    deterministic: bool = False
    allow_tf32: bool = False
    prefers_cublaslt: bool = False
    cudnn_deterministic: bool = False
    cudnn_tf32: bool = True
    conv_benchmark_empties_cache: bool = True
    environ: Mapping[str, str]
    flash_sdp: bool = True
    mem_efficient_sdp: bool = True
    cudnn_sdp: bool = True
    math_sdp: bool = True
    half_reduction_math_sdp: bool = False
    sdp_priority: tuple[int, ...] | None = None
    cudnn_version: int = 0
    cuda_version: tuple[int, int] = (13, 0)
    searched: set[Hashable] = field(default_factory=set, compare=False)
    profile: MeasuredTable | None = field(default=None, compare=False)

    @property
    def cudnn(self) -> int:
        """The cuDNN in use, in its own numbering (9.20.0 is 92000)."""
        return self.cudnn_version or _CUDNN_OF_WHEEL.get(self.torch_version, _CUDNN_OF_NEWER)

    @property
    def sm(self) -> int:
        """Compute capability as one number, 86 for 8.6."""
        return self.capability[0] * 10 + self.capability[1]

    def flag(self, name: str) -> bool | None:
        """An environment switch as ``c10::utils::check_env`` reads it: "1" or "0", anything else is unset."""
        return {"1": True, "0": False}.get(self.environ.get(name, ""))


@dataclass(frozen=True, slots=True)
class Extras:
    """Temporaries of one kernel, all gone when it returns.

    Entries are bytes. A negative entry gives a block back earlier (`given_back`), a `Spare` one is done without
    where it does not fit, and `EMPTY_CACHE` hands unused segments back to the card.

    Attributes:
        before: those allocated before the op's outputs exist, in order.
        after: those allocated once the outputs exist, in order.
        between: for ops that make one output after the other, the i-th are allocated once the i-th output
            exists and are gone before the next one does.
        error_bytes: how far their sum may be higher than told, where a closed library decides.
        error_below_bytes: how far their sum may be lower than told.
        between_errors: by how much each of ``between`` may be lower and higher; empty where nothing is estimated
            there.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    error_bytes: int = 0
    error_below_bytes: int = 0
    between: tuple[tuple[int, ...], ...] = ()
    between_errors: tuple[tuple[int, int], ...] = ()


class Spare(int):
    """An entry of `Extras` that the kernel does without, or takes a smaller algorithm for, where it does not fit."""


EMPTY_CACHE = -(1 << 62)
"""An entry of `Extras`: the allocator gives its unused segments back to the card."""

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Rule = Callable[[Args, Kwargs, Any, KernelContext], Extras | None]


def overloads(*names: str) -> list[torch._ops.OpOverload]:
    """The aten overloads of these names (``"mm"`` or ``"mm.out"``) that this torch release has."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if isinstance(op, torch._ops.OpOverload):
            found.append(op)
    return found


def table(rules: Mapping[tuple[str, ...] | str, Rule]) -> dict[torch._ops.OpOverload, Rule]:
    """Turn rules keyed by one or more op names into rules keyed by overload."""
    return {
        op: rule
        for names, rule in rules.items()
        for op in overloads(*((names,) if isinstance(names, str) else names))
    }


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    """An argument that may have been given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a dense copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def temporaries(*sizes: int, error_bytes: int = 0, error_below_bytes: int = 0) -> Extras | None:
    """Extras after the outputs; None when nothing is allocated."""
    kept = tuple(size for size in sizes if size)
    if not (kept or error_bytes):
        return None
    return Extras(after=kept, error_bytes=error_bytes, error_below_bytes=error_below_bytes)


def workspace(*sizes: int, error_bytes: int = 0, error_below_bytes: int = 0) -> Extras | None:
    """Extras before the outputs; None when nothing is allocated."""
    kept = tuple(size for size in sizes if size)
    if not (kept or error_bytes):
        return None
    return Extras(before=kept, error_bytes=error_bytes, error_below_bytes=error_below_bytes)


def given_back(number: int) -> int:
    """An entry of `Extras` that takes no block but gives one back: the ``number``-th of its list, from 1."""
    return -number


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above a value."""
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-value // divisor)
