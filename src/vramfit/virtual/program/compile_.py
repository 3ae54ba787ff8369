"""``torch.compile``: the program runs eagerly, and is told what that means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vramfit.virtual.patching import PatchStack

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode

MESSAGE = (
    "torch.compile was asked for and the program ran eagerly: a compiled program fuses operations and saves fewer "
    "activations, so its peak is usually lower than this one, while its first calls need extra time and workspace"
)


def install(mode: VirtualMode, patches: PatchStack) -> None:
    """Replace ``torch.compile`` by a version that returns what it was given, in the same wrapper."""

    def compile(model: Any = None, **options: Any) -> Any:
        mode.machine.warn("compile-ran-eagerly", MESSAGE)
        if model is None:
            return lambda function: compile(function, **options)
        return _wrap_module(model) if isinstance(model, nn.Module) else model

    patches.set(torch, "compile", compile)


def _wrap_module(model: nn.Module) -> nn.Module:
    from torch._dynamo.eval_frame import OptimizedModule

    # The real wrapper (state_dict keys with _orig_mod., attribute forwarding) around a compiler that does nothing.
    return OptimizedModule(model, _Eager())  # type: ignore[arg-type]


class _Eager:
    """Stands where OptimizedModule expects a compiler."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
