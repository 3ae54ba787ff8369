"""What stands around a model in a program: data parallelism, the compiler and the like."""

from __future__ import annotations

from torch import nn

from vramfit.torch_internals.layers import compiled_from, wraps_compiled

_WITH_MODULE = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})
"""Classes, of torch and of what derives from it, that hold the model as ``module``."""

SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})
"""Of them, those whose parameters are parts of the model's."""


COMPILED = "torch.compile"
"""What `peeled` calls the wrapper of ``torch.compile(model)``."""


def peeled(module: nn.Module) -> tuple[tuple[str, ...], nn.Module]:
    """The names of what wraps a model, from the outside in, and the model."""
    names: list[str] = []
    while True:
        inner = _inside(module)
        if inner is None:
            break
        names.append(COMPILED if wraps_compiled(module) else type(module).__name__)
        module = inner
    names += (base.__name__ for base in type(module).__mro__ if base.__name__ == "FSDPModule")
    return tuple(names), module


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the program gave a module: ``fully_shard`` puts one of its own in its place, under another name.

    Its bases are ``FSDPModule`` and the module's class (torch/distributed/fsdp/_fully_shard/_fsdp_init.py).
    """
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]
    return kind


def kind_of(model: nn.Module) -> str:
    """The name of that class."""
    return own_class(model).__name__


def _inside(module: nn.Module) -> nn.Module | None:
    if wraps_compiled(module):
        return compiled_from(module)
    wraps = any(base.__name__ in _WITH_MODULE for base in type(module).__mro__)
    inner = getattr(module, "module", None) if wraps else None
    return inner if isinstance(inner, nn.Module) else None
