"""``torch.nn``: base classes of layers, hooks of all modules, and the implementations of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vramfit.torch_internals.names import Feature

_FEATURE = Feature("telling layers apart")

BatchNorm: Any = _FEATURE.find("torch.nn.modules.batchnorm._BatchNorm")
NormBase: Any = _FEATURE.find("torch.nn.modules.batchnorm._NormBase")
ConvNd: Any = _FEATURE.find("torch.nn.modules.conv._ConvNd")
ConvTransposeNd: Any = _FEATURE.find("torch.nn.modules.conv._ConvTransposeNd")
DropoutNd: Any = _FEATURE.find("torch.nn.modules.dropout._DropoutNd")

global_backward_hooks: Any = _FEATURE.find("torch.nn.modules.module._global_backward_hooks")
global_forward_hooks: Any = _FEATURE.find("torch.nn.modules.module._global_forward_hooks")
global_forward_pre_hooks: Any = _FEATURE.find("torch.nn.modules.module._global_forward_pre_hooks")
rnn_impls: Any = _FEATURE.find("torch.nn.modules.rnn._rnn_impls")
module_apply = _FEATURE.place("torch.nn.Module._apply")


def wraps_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` gives (torch/_dynamo/eval_frame.py, ``OptimizedModule``)."""
    return hasattr(module, "_orig_mod")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by ``module.compile()`` or by ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or wraps_compiled(module)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Give a module a compiled call, as ``module.compile()`` does; None gives its own back."""
    module._compiled_call_impl = call


def compiled_from(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wraps; any other module is itself."""
    return module._orig_mod if wraps_compiled(module) else module  # type: ignore[return-value]
