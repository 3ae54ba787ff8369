"""Operators that programs register: their definitions, descriptions by shape and Triton kernels."""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals.names import Feature

_FEATURE = Feature("operators that programs register")

FakeImplCtx: Any = _FEATURE.find("torch._library.fake_impl.FakeImplCtx")
_DEFINITIONS: Any = _FEATURE.find("torch._library.custom_ops.OPDEFS")
set_fake_context_getter: Any = _FEATURE.find("torch._library.fake_impl.set_ctx_getter")
simple_registry: Any = _FEATURE.find("torch._library.simple_registry")
triton_ops_to_kernels: Any = _FEATURE.find("torch._library.triton.triton_ops_to_kernels")


def definition_of(name: str) -> Any:
    """The ``torch.library.custom_op`` behind an operator; None for other operators."""
    found: Any = _DEFINITIONS.get(name) if _DEFINITIONS else None
    return found


def fake_kernel_of(name: str) -> Any:
    """What a program has registered to describe an operator by shape; None without."""
    return simple_registry.singleton.find(name).fake_impl.kernel
