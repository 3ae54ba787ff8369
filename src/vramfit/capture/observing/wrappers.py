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


def kind_of(model: nn.Module) -> str:
    """The name of a model's class: that of the program where ``fully_shard`` has derived one of its own from it."""
    kinds = type(model).__mro__
    if any(base.__name__ == "FSDPModule" for base in kinds[1:]):
        # torch/distributed/fsdp/_fully_shard/_fsdp_init.py: type(f"FSDP{cls.__name__}", (FSDPModule, cls), dct)
        return next(base.__name__ for base in kinds[1:] if base.__name__ != "FSDPModule")
    return kinds[0].__name__


def _inside(module: nn.Module) -> nn.Module | None:
    if wraps_compiled(module):
        return compiled_from(module)
    wraps = any(base.__name__ in _WITH_MODULE for base in type(module).__mro__)
    inner = getattr(module, "module", None) if wraps else None
    return inner if isinstance(inner, nn.Module) else None
