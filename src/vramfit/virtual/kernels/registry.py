"""One table of every rule about what a kernel allocates beyond its outputs, looked up by op.

A module of this package with a table ``RULES`` takes part: there is no list to add it to.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from vramfit.virtual.kernels.context import Args, Extras, KernelContext, Kwargs, Rule


def _families() -> Iterator[dict[torch._ops.OpOverload, Rule]]:
    """The rules of each module beside this one that has any."""
    package, _, own = __name__.rpartition(".")
    for found in pkgutil.iter_modules([__file__.rpartition(os.sep)[0]]):
        if found.name != own:
            yield getattr(import_module(f"{package}.{found.name}"), "RULES", {})


_RULES = {op: rule for family in _families() for op, rule in family.items()}


def extras(
    func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext
) -> Extras | None:
    """Temporaries that an op's CUDA kernel allocates; None when it allocates nothing beyond its outputs.

    Args:
        func: the op.
        args: its positional arguments (tensors may be fake).
        kwargs: its keyword arguments.
        outputs: what it returned.
        ctx: the card and torch's switches; a call that its profile knows is answered from there.
    """
    if ctx.profile is not None:
        measured = ctx.profile.extras(func, args, kwargs, ctx)
        if measured is not None:
            return measured
    rule = _RULES.get(func)
    return rule(args, kwargs, outputs, ctx) if rule is not None else None


def has_rule(func: torch._ops.OpOverload) -> bool:
    """Whether an op has a rule."""
    return func in _RULES


def covered() -> frozenset[str]:
    """Names of the op overloads that have a rule."""
    return frozenset(str(func) for func in _RULES)
