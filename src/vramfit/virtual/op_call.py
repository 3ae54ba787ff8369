"""One call of an op: its arguments and results, the state that its kernel depends on, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from vramfit.capture.ops import OpInfo, device_of, mutated_tensors, tensors_in
from vramfit.cudnn.found_library import of_torch
from vramfit.cudnn.questions import AttentionQuestion, ConvAnswer, ConvQuestion
from vramfit.gpus import GpuSpec
from vramfit.torch_internals.dispatch import OpOverload


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext:
    """The card, the torch release and the switches on which kernels depend.

    Attributes:
        spec: the card.
        capability: its compute capability, ``(major, minor)``.
        torch_version: ``(2, 13)``.
        cudnn_enabled: ``torch.backends.cudnn.enabled``.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark``.
        deterministic: ``torch.use_deterministic_algorithms(True)`` (not in its warn-only form).
        allow_tf32: float32 matrix products may use TF32.
        prefers_cublaslt: the program prefers cuBLASLt to cuBLAS (``torch.backends.cuda.preferred_blas_library``,
            ``TORCH_BLAS_PREFER_CUBLASLT``).
        cudnn_deterministic: ``torch.backends.cudnn.deterministic``, or deterministic algorithms even in their warn-only
            form.
        cudnn_tf32: float32 convolutions may use TF32 (``torch.backends.cudnn.conv.fp32_precision``).
        conv_benchmark_empties_cache: the search of benchmark mode ends with ``torch.cuda.empty_cache()``
            (``torch._C._cudnn_set_conv_benchmark_empty_cache``).
        environ: the program's environment variables.
        flash_sdp: flash attention may be chosen (``torch.backends.cuda.flash_sdp_enabled()``).
        mem_efficient_sdp, cudnn_sdp, math_sdp: the same for memory-efficient and cuDNN attention and the math fallback.
        half_reduction_math_sdp: the math fallback computes in half precision
            (``torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()``), off by default.
        sdp_priority: the order set by ``sdpa_kernel(..., set_priority=True)`` as ``SDPBackend`` numbers, or None.
        cudnn_version: cuDNN as ``torch.backends.cudnn.version()`` numbers it; 0 for that of the default wheel.
        cuda_version: CUDA that torch was built with, ``(13, 0)`` in the default wheels since 2.11.
        searched: convolutions for which benchmark mode has searched an algorithm already; grows.
        plans_kept: which of cuDNN's plans a convolution uses where its first one did not fit; grows.
        profile: calls that were measured on the card, which take precedence over any rule; None without a profile.
        asker: an installed cuDNN that may be asked; None without one.
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
    plans_kept: dict[Hashable, int] = field(default_factory=dict, compare=False)
    profile: MeasuredCalls | None = field(default=None, compare=False)
    asker: WorkspaceAsker | None = field(default=None, compare=False)

    @property
    def cudnn(self) -> int:
        """The cuDNN in use, in its own numbering (9.20.0 is 92000)."""
        return self.cudnn_version or of_torch(self.torch_version)

    @property
    def sm(self) -> int:
        """Compute capability as one number, 86 for 8.6."""
        return self.capability[0] * 10 + self.capability[1]

    def flag(self, name: str) -> bool | None:
        """An environment switch as ``c10::utils::check_env`` reads it: "1" or "0", anything else is unset."""
        return {"1": True, "0": False}.get(self.environ.get(name, ""))


def argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None
) -> Any:
    """An argument that may have been given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


class OpCall:
    """An op with its arguments, and what is known of the call so far.

    Args:
        func: the op.
        info: what its schema says.
        args, kwargs: its arguments; where they are fake tensors they carry shapes.
        out: its results; None until they are described.
        device: index of the card on which it runs; None on the host, and until the results are placed.
        context: of the kernels of that card; only calls on a card have one.
    """

    __slots__ = ("_context", "args", "device", "func", "info", "kwargs", "out")

    def __init__(
        self,
        func: OpOverload,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any = None,
        device: int | None = None,
        context: KernelContext | None = None,
    ) -> None:
        self.func = func
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.device = device
        self._context = context

    @property
    def context(self) -> KernelContext:
        """What decides how the op's kernel behaves."""
        assert self._context is not None, f"{self.info.name} does not run on a card"
        return self._context

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may have been given by position or by name."""
        return argument(self.args, self.kwargs, position, name, default)

    def by_name(self) -> dict[str, Any]:
        """All arguments by the names in the op's schema, with defaults where none was given."""
        arguments = self.func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments}
        return given | dict(zip(given, self.args, strict=False)) | self.kwargs

    def named_sizes(self) -> frozenset[int]:
        """The whole numbers among its arguments."""
        return frozenset(_numbers((self.args, tuple(self.kwargs.values()))))

    def with_arguments(self, *args: Any) -> OpCall:
        """The same op with other positional arguments, and nothing known of its results."""
        return OpCall(self.func, self.info, args, self.kwargs)

    def runs_on(self, device: int | None, context: KernelContext | None) -> None:
        """Note the card on which the op runs, None for the host, and the context of its kernels."""
        self.device, self._context = device, context

    def find_device(self) -> int | None:
        """Index of the card on which the op runs, from its results and arguments; None for the host."""
        return device_of(self.out, self.args, self.kwargs)

    def written(self) -> list[torch.Tensor]:
        """The tensors that the op writes, lists flattened."""
        return mutated_tensors(self.info, self.args, self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among its arguments, lists flattened."""
        return tensors_in((self.args, tuple(self.kwargs.values())))


@dataclass(frozen=True, slots=True)
class Extras:
    """Temporaries of one kernel, all gone when it returns.

    Entries are bytes. A negative entry gives a block back earlier (`given_back`), the kernel does without a `Spare` one
    that does not fit, and `EMPTY_CACHE` hands unused segments back to the card.

    Attributes:
        before: those allocated before the op's outputs exist, in order.
        after: those allocated once the outputs exist, in order.
        between: for ops that make one output after the other, the i-th are allocated once the i-th output exists and
            are gone before the next one does.
        until: position of the part of ``between`` with which those ``before`` go; -1: when the kernel returns.
        error_bytes, error_below_bytes: how far their real sum may lie above and below, where a closed library decides.
        between_errors: bytes by which each of ``between`` may be lower and higher; empty where nothing there is an
            estimate.
        choices: what decides the estimate, or each in ``between``: those that one choice of a library decides are off
            the same way. Empty: each kind is off on its own.
        kept_errors: of results that an op keeps and whose size is an estimate: position, and how far it may be lower
            and higher.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    error_bytes: int = 0
    error_below_bytes: int = 0
    between: tuple[tuple[int, ...], ...] = ()
    between_errors: tuple[tuple[int, int], ...] = ()
    choices: tuple[str, ...] = ()
    kept_errors: tuple[tuple[int, int, int], ...] = ()
    until: int = -1


class Spare(int):
    """An entry of `Extras` that the kernel does without, or takes a smaller algorithm for, where it does not fit."""


class Alternatives(Spare):
    """A `Spare` of which the kernel tries several, in order, until one fits.

    Attributes:
        tries: gives the bytes of each; 0 for an algorithm that takes nothing. Those may change from call to call.
    """

    tries: Callable[[], Iterator[int]]

    def __new__(cls, size: int, tries: Callable[[], Iterator[int]]) -> Self:
        """An entry of so many bytes, usually."""
        made = super().__new__(cls, size)
        made.tries = tries
        return made


EMPTY_CACHE = -(1 << 62)
"""An entry of `Extras`: the allocator gives its unused segments back to the card."""


def _numbers(tree: Any) -> list[int]:
    """The whole numbers of nested values."""
    if type(tree) is int:
        return [tree]
    return [n for item in tree for n in _numbers(item)] if isinstance(tree, (list, tuple)) else []


class WorkspaceAsker(Protocol):
    """A cuDNN that answers questions about convolutions and attention on a card."""

    @property
    def version(self) -> int:
        """Of the library, in its own numbering."""

    def plans(self, question: ConvQuestion) -> ConvAnswer | None:
        """The plans that torch would try for a convolution; None where it cannot say."""

    def attention(self, question: AttentionQuestion) -> int | None:
        """Workspace in bytes of the plan that torch would run for attention; None where it cannot say."""


class MeasuredCalls(Protocol):
    """Calls that were measured on a card."""

    def extras(self, call: OpCall) -> Extras | None:
        """Temporaries of a call as they were measured, without an error bar; None if it was not."""

    def knows(self, func: OpOverload) -> bool:
        """Whether any call of an op was measured."""

    def library(self, func: OpOverload) -> str | None:
        """The library whose first use by an op makes the context grow; None where there is none."""
