"""One table of every rule about what a kernel allocates beyond its outputs, looked up by op.

A module of this package with a table ``RULES`` takes part: there is no list to add it to.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import torch

from vramfit.virtual.kernels.rules import Rule
from vramfit.virtual.op_call import Extras, OpCall


def _families() -> Iterator[dict[torch._ops.OpOverload, Rule]]:
    """The rules of each module beside this one that has any."""
    package, _, own = __name__.rpartition(".")
    for found in pkgutil.iter_modules([__file__.rpartition(os.sep)[0]]):
        if found.name != own:
            yield getattr(import_module(f"{package}.{found.name}"), "RULES", {})


_RULES = {op: rule for family in _families() for op, rule in family.items()}


def extras(call: OpCall) -> Extras | None:
    """Temporaries that an op's CUDA kernel allocates; None when it allocates nothing beyond its outputs.

    Calls that were measured on the card are answered from its profile.
    """
    profile = call.context.profile
    if profile is not None and (measured := profile.extras(call)) is not None:
        return measured
    rule = _RULES.get(call.func)
    return rule(call) if rule is not None else None


def has_rule(func: torch._ops.OpOverload) -> bool:
    """Whether an op has a rule."""
    return func in _RULES


def covered() -> frozenset[str]:
    """Names of the op overloads that have a rule."""
    return frozenset(str(func) for func in _RULES)
