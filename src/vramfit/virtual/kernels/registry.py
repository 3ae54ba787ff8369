"""One table of every rule about what a kernel allocates beyond its outputs, looked up by op."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.kernels import (
    attention,
    convolution,
    copying,
    ctc,
    embedding,
    fft,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    optim,
    reduction,
    rnn,
    sampling,
    scanning,
    selecting,
    sorting,
    sparse,
    vision,
)
from vramfit.virtual.kernels.context import Args, Extras, KernelContext, Kwargs, Rule

_FAMILIES = (
    attention,
    convolution,
    copying,
    ctc,
    embedding,
    fft,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    optim,
    reduction,
    rnn,
    sampling,
    scanning,
    selecting,
    sorting,
    sparse,
    vision,
)
_RULES: dict[torch._ops.OpOverload, Rule] = {
    op: rule for family in _FAMILIES for op, rule in family.RULES.items()
}


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
