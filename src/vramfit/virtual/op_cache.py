"""What an op did for arguments like these before, so that it need not be worked out again.

NOTE [What is remembered]
A program runs the same ops on the same shapes again and again. What such an op returns, which blocks it takes and how
long it works follows from the op and from what a key (`describe.key_of`) holds: shape, strides, offset, dtype and
device of each tensor, and the other arguments with their types. Where the op has a kernel rule, it follows from the
kernels' context too, which is made anew when a switch of torch changes. All of that is a `RememberedCall`. What changes
from call to call is worked out each time: addresses, stacks, modules, phases and categories, cuBLAS's workspaces, true
values, gradients that the engine sums in place.

Nothing is remembered of ops whose results do not fit a `Recipe`, that run on the host, or whose temporaries were
measured on the card or searched for by cuDNN. Nor is a plan used while an argument rests on an assumed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vramfit.capture.ops import OpInfo, placed, tensors_in
from vramfit.capture.storages import describe
from vramfit.trace import TraceBuilder
from vramfit.virtual import kernels
from vramfit.virtual.data_dependent.assume import TELLING
from vramfit.virtual.data_dependent.expectations import WATCHED, may_be_expected
from vramfit.virtual.data_dependent.shading import is_quiet
from vramfit.virtual.data_dependent.shadow import follows, most_known
from vramfit.virtual.describe import Output, Recipe
from vramfit.virtual.fills import Concern, concern
from vramfit.virtual.kernels import Blas, Extras, KernelContext
from vramfit.virtual.masks import is_counting
from vramfit.virtual.op_call import OpCall

MAX_PLANS = 100_000
"""Plans of all ops together; beyond them all are forgotten."""


class Shades(IntEnum):
    """How calls of an op affect true values."""

    NOT = 0
    """Not at all."""
    IF_KNOWN = 1
    """They are computed if all that it reads is known, else nothing is known of the results."""
    FORGET = 2
    """It reads what is too large to be known: nothing is known of what it writes either."""
    FOLLOW = 3
    """In another way: see `Shading.follow`."""


@dataclass(init=False, repr=False, eq=False, slots=True)
class RememberedCall:
    """All that a call did that the next one like it does too.

    Attributes:
        recipe: how its results are made.
        view: they only alias its arguments, and nothing else happens.
        device: index of the card.
        context: of the kernels; None where no rule asks for it.
        microseconds: for which the card works.
        op: its name's index in the trace, -1 where it takes nothing.
        fresh: for each result with a storage of its own on the card, in the order in which they are made: its position,
            bytes and its description's index in the trace.
        others: positions of the results that lie in the storage of an argument.
        extras: temporaries; None without.
        libraries: whose workspaces it makes sure of.
        named: sizes of its results that its arguments name and that could be assumed ones.
        expects: whether something may be expected of values that it makes or writes.
        shades: how it affects true values.
        counts: whether it counts how many elements of a mask hold.
        fills: whether it makes or carries on fills.
    """

    recipe: Recipe
    view: bool
    device: int
    context: KernelContext | None
    microseconds: float
    op: int
    fresh: tuple[tuple[int, int, int], ...]
    others: tuple[int, ...]
    extras: Extras | None
    libraries: tuple[Blas, ...]
    named: tuple[int, ...]
    expects: bool
    shades: Shades
    counts: bool
    fills: Concern


def plan_of_view(recipe: Recipe) -> RememberedCall:
    """The plan of an op that makes a view, and does nothing else."""
    plan = RememberedCall()
    plan.recipe, plan.view, plan.named = recipe, True, ()
    return plan


def plan_of(
    call: OpCall,
    device: int,
    recipe: Recipe,
    *,
    tensors: Sequence[torch.Tensor],
    microseconds: float,
    builder: TraceBuilder,
) -> RememberedCall | None:
    """The plan of a call whose results rest on nothing assumed; None where the next call like it may do otherwise.

    Args:
        device: index of the card on which it ran.
        microseconds: for which the card worked.
    """
    func, info, out, context = call.func, call.info, call.out, call.context
    if context.profile is not None and context.profile.knows(func):
        return None
    ruled = kernels.has_rule(func)
    if ruled and context.cudnn_benchmark:
        return None
    extras = kernels.extras(call) if ruled else None
    plan = RememberedCall()
    plan.recipe, plan.view, plan.device, plan.microseconds = recipe, False, device, microseconds
    plan.extras = extras
    plan.libraries = kernels.blas_libraries(call)
    asked = ruled or kernels.may_use_blas(func) or func._overloadpacket in flop_registry
    plan.context = context if asked else None
    plan.fresh, plan.others = _results(info, out, recipe[1], builder)
    if extras is not None and extras.between and plan.others:
        return None
    plan.op = builder.op(info.name) if any(nbytes for _, nbytes, _ in plan.fresh) else -1
    made = {size for tensor in tensors_in(out) for size in tensor.shape}
    plan.named = tuple(size for size in call.named_sizes() & made if size >= TELLING)
    written = call.written() if info.mutated else []
    plan.expects = may_be_expected(call, written)
    plan.counts, plan.fills = is_counting(func), concern(call)
    # The count of a large mask may have been used; once the mask is overwritten, that no longer counts.
    plan.shades = Shades.FORGET if any(tensor.dtype in WATCHED for tensor in written) else Shades.NOT
    if follows(info, out, written, [kind for kind, _ in recipe[1]]):
        plan.shades = Shades.FOLLOW
        if is_quiet(call):
            large = any(tensor.numel() > most_known(tensor) for tensor in tensors)
            plan.shades = Shades.FORGET if large else Shades.IF_KNOWN
    return plan


def _results(
    info: OpInfo, out: Any, outputs: tuple[tuple[int, Any], ...], builder: TraceBuilder
) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]:
    if not (info.fresh or info.mutated):
        return (), ()
    results = list(enumerate(out if isinstance(out, (list, tuple)) else (out,)))
    fresh, others = [], []
    for position, result in info.as_made(results):
        if not placed(result):
            continue
        if outputs[position][0] == Output.FRESH:
            nbytes = result.untyped_storage().nbytes()
            fresh.append((position, nbytes, builder.tensor(describe(result)) if nbytes else -1))
        else:
            others.append(position)
    return tuple(fresh), tuple(others)
