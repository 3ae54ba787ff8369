"""Workspaces of convolutions as an installed cuDNN gives them, where the user lets it be asked (`vramfit.cudnn`).

NOTE [Plans that are kept]
torch keeps the plan that ran, for each thread and convolution (``benchmark_cache`` in Conv_v8.cpp), and tries it first
the next time. A plan whose workspace could not be allocated is passed over, and then the one that ran instead stays in
use, also when there is room again: near a card's limit, what a convolution takes depends on what happened before.

What cuDNN answers is certain where it is the very version that this torch has. Another version may choose otherwise:
then the bar reaches as far as the rules' does. Clocks differ from card to card of one name, and from Hopper on they
decide now and then, so the card is asked about at other clocks too, and the bar holds those answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from vramfit.cudnn.questions import ConvAnswer, ConvPass, ConvPlan, ConvQuestion, TensorShape
from vramfit.virtual.kernels.conv_workspace import (
    Pass,
    Shapes,
    WorkspaceEstimate,
    estimate,
    multiplies_by_image,
)
from vramfit.virtual.op_call import Alternatives, KernelContext, Spare, WorkspaceAsker

_PASSES = {
    Pass.FORWARD: ConvPass.FORWARD,
    Pass.BACKWARD_DATA: ConvPass.BACKWARD_DATA,
    Pass.BACKWARD_FILTER: ConvPass.BACKWARD_FILTER,
}
_TRIED = 24
"""Plans that are tried where the first ones do not fit; cuDNN lists about as many in all."""

_ALIGNMENT = 32
"""Most that torch tells cuDNN of an address (``getAlignment``); the allocator's are multiples of 512."""

_ANY_CLOCK = 90
"""Compute capability below which clocks were seen to change no answer."""


def asked_workspace(
    shapes: Shapes,
    kind: Pass,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int]],
    alignments: tuple[int, int, int],
    ctx: KernelContext,
) -> WorkspaceEstimate | None:
    """Workspace of one convolution as cuDNN gives it; None where it cannot say.

    Args:
        shapes: the convolution.
        kind: what is computed.
        geometry: padding, stride and dilation.
        alignments: of the addresses of what the filters read, of what they make, and of the filters, in bytes.
        ctx: the card, whose ``asker`` is asked.
    """
    asker = ctx.asker
    if asker is None or multiplies_by_image(shapes, ctx):
        return None
    question = _question(shapes, kind, geometry, alignments, ctx)
    answer = asker.plans(question)
    if answer is None or not answer.plans:
        return None
    first = answer.plans[0].workspace
    anywhere = (first, *answer.at_other_clocks)
    least, most = min(anywhere), max(anywhere)
    choice = ""
    if asker.version != ctx.cudnn or shapes.is_1x1:  # see NOTE [Choices] in conv_workspace.py
        rule = estimate(shapes, kind, ctx)
        choice = rule.choice
        least, most = min(least, rule.size - rule.below), max(most, rule.size + rule.above)
    if ctx.cudnn_benchmark:
        return _searched(question, answer, (least, most), ctx)
    size = Alternatives(first, lambda: _tries(question, first, asker, ctx)) if first else Spare(0)
    return WorkspaceEstimate(size=size, above=most - first, below=first - least, choice=choice)


def _question(
    shapes: Shapes,
    kind: Pass,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int]],
    alignments: tuple[int, int, int],
    ctx: KernelContext,
) -> ConvQuestion:
    """What torch asks: one dimension of pixels is made two (``view1d_as_2d`` in Convolution.cpp)."""
    tensors = [
        TensorShape(
            dims=dims, strides=_strides(dims, channels_last=shapes.channels_last), alignment=alignment
        )
        for dims, alignment in zip(
            (_with_rows(shape) for shape in (*shapes.images, shapes.weight)), alignments, strict=True
        )
    ]
    dimensions = len(tensors[0].dims) - 2
    padding, stride, dilation = (
        _spread(values, dimensions, filling) for values, filling in zip(geometry, (0, 1, 1), strict=True)
    )
    return ConvQuestion(
        kind=_PASSES[kind],
        dtype=str(shapes.dtype).removeprefix("torch."),
        x=tensors[0],
        y=tensors[1],
        w=tensors[2],
        padding=padding,
        stride=stride,
        dilation=dilation,
        tf32=ctx.cudnn_tf32,
        deterministic=ctx.cudnn_deterministic,
        mode_b=ctx.flag("TORCH_CUDNN_USE_HEURISTIC_MODE_B") is True,
        most=0 if ctx.cudnn_benchmark else 1,
        any_clock=ctx.sm >= _ANY_CLOCK,
    )


def _with_rows(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else tuple(shape)


def _spread(values: Sequence[int], dimensions: int, filling: int) -> tuple[int, ...]:
    """One value for each dimension: of one value for all, and of those for one where there are two."""
    if len(values) == dimensions:
        return tuple(values)
    if len(values) == 1 and dimensions == 2:
        return (filling, values[0])
    return tuple(values) * dimensions


def _strides(dims: Sequence[int], *, channels_last: bool) -> tuple[int, ...]:
    """Strides of a dense tensor, those of single rows and channels included (``fixSizeOneDimStride``)."""
    order = [0, *range(2, len(dims)), 1] if channels_last else list(range(len(dims)))
    strides, step = [0] * len(dims), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= dims[dim]
    return tuple(strides)


def alignment_of(tensor: torch.Tensor) -> int:
    """What a tensor's address is a multiple of, in bytes, at most 32."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return min(_ALIGNMENT, offset & -offset) if offset else _ALIGNMENT


def _tries(question: ConvQuestion, first: int, asker: WorkspaceAsker, ctx: KernelContext) -> Iterator[int]:
    """Workspaces of the plans that are tried, the one in use first. See NOTE [Plans that are kept]."""
    key = threading.get_ident(), question
    used = ctx.plans_kept.get(key)
    yield first if used is None else _plans(question, asker)[used].workspace
    for index, plan in enumerate(_plans(question, asker)):
        ctx.plans_kept[key] = index
        yield plan.workspace


def _plans(question: ConvQuestion, asker: WorkspaceAsker) -> tuple[ConvPlan, ...]:
    """All plans that torch would try, for a convolution whose first one did not fit."""
    answer = asker.plans(question.with_most(_TRIED))
    return () if answer is None else answer.plans


def _searched(
    question: ConvQuestion,
    answer: ConvAnswer,
    reach: tuple[int, int],
    ctx: KernelContext,
) -> WorkspaceEstimate:
    """Benchmark mode: the largest workspace of all plans for the search, then that of the fastest, which is not known.

    Which one is the fastest only the card can tell: the heuristics' first is taken, and the bar holds all of them.
    """
    sizes = [plan.workspace for plan in answer.plans]
    size = sizes[0]
    least, most = min(*sizes, reach[0]), max(*sizes, reach[1])
    found = WorkspaceEstimate(size=Spare(size), above=most - size, below=size - least)
    key = threading.get_ident(), question
    if key in ctx.searched:
        return found
    ctx.searched.add(key)
    return WorkspaceEstimate(
        size=found.size,
        above=found.above,
        below=found.below,
        trial=max(sizes),
        clears=ctx.conv_benchmark_empties_cache,
    )
