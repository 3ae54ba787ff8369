"""Contexts of real cards and fake tensors to ask the rules about."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vramfit.capture.ops import OpInfo
from vramfit.gpus import find_gpu
from vramfit.virtual import kernels
from vramfit.virtual.kernels import Blas, Extras, KernelContext
from vramfit.virtual.op_call import OpCall

aten = torch.ops.aten
FAKE = FakeTensorMode(allow_fallback_kernels=False)


def context(card: str = "A100 80GB", version: tuple[int, int] = (2, 13), **changes: Any) -> KernelContext:
    spec = find_gpu(card)
    settings: dict[str, Any] = {"environ": {}, **changes}
    return KernelContext(spec=spec, capability=spec.compute_capability, torch_version=version, **settings)


def cuda(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    with FAKE:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=requires_grad)


def ask(
    func: Any, *args: Any, ctx: KernelContext | None = None, outputs: Any = None, **kwargs: Any
) -> Extras | None:
    """Extras of an op; its outputs are worked out on fake tensors unless given."""
    if outputs is None:
        with FAKE:
            outputs = func(*args, **kwargs)
    return extras(func, args, kwargs, outputs, ctx or context())


def call_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, ctx: KernelContext
) -> OpCall:
    """A call on a card whose kernels have that context."""
    return OpCall(func, OpInfo(func, None), args, kwargs, outputs, 0, ctx)


def extras(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, ctx: KernelContext
) -> Extras | None:
    """What `kernels.extras` says of a call with these results."""
    return kernels.extras(call_of(func, args, kwargs, outputs, ctx))


def blas_libraries(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: KernelContext
) -> tuple[Blas, ...]:
    """What `kernels.blas_libraries` says of a call."""
    return kernels.blas_libraries(call_of(func, args, kwargs, None, ctx))


def blas_library(func: Any, args: tuple[Any, ...], ctx: KernelContext) -> Blas | None:
    """Whose workspace an op uses; ``CUBLAS`` for both libraries where they share one."""
    libraries = blas_libraries(func, args, {}, ctx)
    return libraries[-1] if libraries else None
