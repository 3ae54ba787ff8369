"""What a profile says of a call: its temporaries as measured on the card, for the same op on the same shapes.

Where a call was measured, the measurement takes the place of the rule and has no error bar. Any other shape keeps
its rule: what a closed library takes does not follow from its neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from vramfit.gpus.measured_profile import MeasuredCall, MeasuredProfile
from vramfit.torch_internals.cuda_device import preferred_blas_backend
from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.kernel_choice import is_cublaslt, takes_tf32
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_LONGEST = 400
"""A longer signature (lists of many tensors) is replaced by its digest."""

_UNSEEN = frozenset(
    {
        *("device", "layout", "pin_memory", "non_blocking", "generator"),
        *("philox_seed", "philox_offset", "rng_state", "unused"),  # states of random generators
    }
)
"""Arguments that say where and how, but do not change what a kernel allocates."""


class Switches(NamedTuple):
    """The switches of torch that change which kernel runs."""

    cudnn_enabled: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_tf32: bool
    deterministic: bool
    matmul_tf32: bool
    prefers_cublaslt: bool

    @classmethod
    def of(cls, ctx: KernelContext) -> Switches:
        """Those of a virtual card."""
        return cls(
            cudnn_enabled=ctx.cudnn_enabled,
            cudnn_benchmark=ctx.cudnn_benchmark,
            cudnn_deterministic=ctx.cudnn_deterministic,
            cudnn_tf32=ctx.cudnn_tf32,
            deterministic=ctx.deterministic,
            matmul_tf32=ctx.allow_tf32,
            prefers_cublaslt=ctx.prefers_cublaslt,
        )

    @classmethod
    def now(cls) -> Switches:
        """Those of this process."""
        cudnn = torch.backends.cudnn
        always = torch.are_deterministic_algorithms_enabled()
        return cls(
            cudnn_enabled=bool(cudnn.enabled),
            cudnn_benchmark=bool(cudnn.benchmark),
            cudnn_deterministic=bool(cudnn.deterministic or always),
            cudnn_tf32=takes_tf32("conv"),
            deterministic=always and not torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_tf32=takes_tf32("matmul"),
            prefers_cublaslt=is_cublaslt(preferred_blas_backend()),
        )

    def text(self, name: str) -> str:
        """Those that concern an op, each as a word; empty when all are as torch sets them."""
        if "convolution" in name or "cudnn" in name:
            words: tuple[str, ...] = (
                "" if self.cudnn_enabled else "no-cudnn",
                "benchmark" if self.cudnn_benchmark else "",
                "deterministic" if self.cudnn_deterministic else "",
                "" if self.cudnn_tf32 else "no-tf32",
            )
        elif any(part in name for part in ("mm", "linear", "addmv")):
            words = ("tf32" if self.matmul_tf32 else "", "lt" if self.prefers_cublaslt else "")
        else:
            words = ("deterministic" if self.deterministic else "",)
        return " ".join(word for word in words if word)


def signature(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], switches: Switches) -> str:
    """What decides the temporaries of a call: shapes, types and layouts, numbers, and switches.

    Real and fake tensors give the same text. A float is named only if it is 0 or 1, and a tensor's device only if that
    is not the card. The size of raw bytes that cuDNN keeps is left out: the rest of the call decides it.
    """
    names, raw = _facts(func)
    words = [
        "raw" if raw and _is_raw(value) else _word(value)
        for name, value in zip(names, args, strict=False)
        if name not in _UNSEEN
    ]
    words += [f"{name}={_word(kwargs[name])}" for name in sorted(kwargs) if name not in _UNSEEN]
    text = ", ".join(words)
    if len(text) > _LONGEST:
        text = f"#{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
    more = switches.text(str(func))
    return f"{text} | {more}" if more else text


@cache
def _facts(func: OpOverload) -> tuple[tuple[str, ...], bool]:
    """Names of an op's arguments, and whether it is one of cuDNN, which keeps raw bytes."""
    return tuple(argument.name for argument in func._schema.arguments), "cudnn" in str(func)


def _is_raw(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and value.dim() == 1


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.0f}." if value in (0.0, 1.0) else "f"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_word(item) for item in value)}]"
    if value is None:
        return "-"
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)[6:]
    return type(value).__name__


def _tensor(tensor: torch.Tensor) -> str:
    where = "" if tensor.device.type == "cuda" else f"@{tensor.device.type}"
    shape = ",".join(str(int(size)) for size in tensor.shape)
    if tensor.layout is not torch.strided:
        return f"{str(tensor.dtype)[6:]}[{shape}]{str(tensor.layout)[6:]}{where}"
    return f"{str(tensor.dtype)[6:]}[{shape}]{_layout(tensor)}{where}"


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return ""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "cl"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "cl"
    return f"s{','.join(str(int(step)) for step in tensor.stride())}"


def library_of(func: OpOverload) -> str | None:
    """The library whose first use makes the context grow; cuBLAS is recognised by its workspace instead."""
    name = func._schema.name.removeprefix("aten::")
    if "convolution" in name or "cudnn" in name:
        return "cudnn"
    if name.startswith("_fft_"):
        return "cufft"
    if name.startswith(("linalg_", "_linalg_", "cholesky", "geqrf", "ormqr", "lu_")):
        return None if name == "linalg_vector_norm" else "cusolver"
    return None


class MeasuredTable:
    """The measured calls of a profile, by op and signature.

    Attributes:
        used: how many calls were answered from it.
    """

    def __init__(self, profile: MeasuredProfile) -> None:
        self.profile = profile
        self.used = 0
        self._calls: dict[OpOverload, Mapping[str, MeasuredCall]] = {}
        for name, calls in profile.ops.items():
            func = _overload(name)
            if func is not None:
                self._calls[func] = calls
        self._libraries: dict[OpOverload, str | None] = {}
        self._switches: tuple[KernelContext, Switches] | None = None

    def extras(self, call: OpCall) -> Extras | None:
        """Temporaries of a call as they were measured, without an error bar; None if it was not."""
        measured, key = self._find(call)
        if measured is None:
            return None
        self.used += 1
        found = measured.usual
        if measured.first is not None and (call.func, key) not in call.context.searched:
            call.context.searched.add((call.func, key))
            found = measured.first
        return Extras(before=found.before, between=found.between, after=found.after)

    def knows(self, func: OpOverload) -> bool:
        """Whether any call of an op was measured."""
        return func in self._calls

    def library(self, func: OpOverload) -> str | None:
        """As `library_of`."""
        if func not in self._libraries:
            self._libraries[func] = library_of(func)
        return self._libraries[func]

    def reserve(self, call: OpCall) -> int | None:
        """Size of the result that a library decides, as measured; None if it was not."""
        measured, _ = self._find(call)
        return None if measured is None else measured.usual.reserve

    def _find(self, call: OpCall) -> tuple[MeasuredCall | None, str]:
        """What was measured of calls like this one, and the text by which they are found."""
        calls = self._calls.get(call.func)
        if calls is None:
            return None, ""
        context = call.context
        if self._switches is None or self._switches[0] is not context:
            self._switches = context, Switches.of(context)
        key = signature(call.func, call.args, call.kwargs, self._switches[1])
        return calls.get(key), key


def _overload(name: str) -> OpOverload | None:
    """The overload of that full name (``aten.mm.default``), None where this torch lacks it."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    return found if isinstance(found, OpOverload) else None
