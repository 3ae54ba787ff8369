"""Convolutions: which kernels a card runs, the copies that bring operands to one layout, and workspaces.

aten/src/ATen/native/Convolution.cpp (``_select_conv_backend``, ``_convolution``, ``convolution_backward``)
chooses between cuDNN and torch's own kernels; native/cudnn/ConvShared.cpp makes the copies and results for cuDNN.
The gradients of input, filters and bias come one after the other, each with its own workspace. What cuDNN takes
is estimated in `conv_workspace`; the kernels of torch itself allocate what stands here.

NOTE [Native kernels]
* Depthwise kernels (cuda/DepthwiseConv2d.cu, DepthwiseConv3d.cu) allocate nothing; they serve every depthwise
  convolution of contiguous tensors except some in float16.
* The others unfold one image at a time into a matrix of columns (cuda/ConvolutionMM2d.cu,
  NaiveDilatedConvolution.cu, NaiveConvolutionTranspose2d.cu, NaiveConvolutionTranspose3d.cu), multiply it with
  cuBLAS, and know no groups: each group is a convolution of its own, and the results are concatenated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.fake_tensors import suggest_memory_format
from vramfit.virtual.kernels.conv_asked import alignment_of, asked_workspace
from vramfit.virtual.kernels.conv_workspace import Pass, Shapes, WorkspaceEstimate, estimate, searched
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.rules import Rule, nbytes, table
from vramfit.virtual.op_call import Extras, KernelContext, OpCall


class ConvBackend(Enum):
    """Who computes a convolution (native/ConvUtils.h, ``ConvBackend``)."""

    CUDNN = auto()
    DEPTHWISE = auto()
    COLUMNS = auto()
    COLUMNS_TRANSPOSED = auto()
    EMPTY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution, forward or backward.

    Attributes:
        source: its input.
        weight: its filters.
        stride, padding, dilation, output_padding: as given, one value or one for each spatial dimension.
        transposed: ``conv_transpose``.
        groups: groups of channels.
    """

    source: torch.Tensor
    weight: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def layout(self) -> torch.memory_format:
        """The layout that cuDNN is given (``cudnn_conv_suggest_memory_format``)."""
        return conv_layout(self.source, self.weight)

    @property
    def depthwise(self) -> bool:
        """One input channel a group (``ConvParams::is_depthwise``)."""
        channels = self.source.shape[1]
        return (
            not self.transposed
            and channels == self.groups
            and self.groups > 1
            and self.weight.shape[0] % channels == 0
        )

    def backend(self, ctx: KernelContext) -> ConvBackend:
        """Who computes it (``_select_conv_backend``)."""
        source, weight = self.source, self.weight
        if not source.numel() or not weight.numel():
            return ConvBackend.EMPTY
        usable = self._cudnn_takes_it(ctx)
        if self.depthwise:
            dense = self.layout is torch.contiguous_format
            # Some float16 shapes go to cuDNN as well (``use_cudnn_depthwise``); neither kernel has a workspace.
            return ConvBackend.CUDNN if usable and not dense else ConvBackend.DEPTHWISE
        if usable:
            return ConvBackend.CUDNN
        return ConvBackend.COLUMNS_TRANSPOSED if self.transposed else ConvBackend.COLUMNS

    def _cudnn_takes_it(self, ctx: KernelContext) -> bool:
        """``ConvParams::use_cudnn``."""
        if not ctx.cudnn_enabled:
            return False
        if ctx.sm < 80 and torch.bfloat16 in (self.source.dtype, self.weight.dtype):
            return False
        dilated = any(value != 1 for value in self.dilation)
        if dilated and ctx.cudnn_deterministic and self.layout is torch.contiguous_format:
            return False
        return not any(extra >= step for extra, step in zip(self.output_padding, self.stride, strict=False))

    def columns(self, outputs: torch.Size) -> int:
        """Bytes of the columns of one image and one group; 0 where a plain product does (NOTE [Native kernels])."""
        kernel = self.weight.shape[2:]
        plain = all(size == 1 for size in kernel) and set(self.stride) == {1} and not any(self.padding)
        if plain and self.source.dim() <= 4:
            return 0
        channels = self.weight.shape[1] if self.transposed else self.source.shape[1] // self.groups
        pixels = self.source.shape[2:] if self.transposed else outputs[2:]
        return channels * math.prod(kernel) * math.prod(pixels) * self.source.element_size()


def conv_layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels-last if either tensor is, except for float64 (native/ConvUtils.h)."""
    if source.dim() not in (4, 5) or torch.float64 in (source.dtype, weight.dtype):
        return torch.contiguous_format
    for tensor in (source, weight):
        if tensor.is_contiguous():
            continue
        found: torch.memory_format = suggest_memory_format(tensor)
        if found is not torch.contiguous_format:
            return found
    return torch.contiguous_format


def layout_copy(tensor: torch.Tensor, layout: torch.memory_format) -> int:
    """Bytes of the copy that brings a tensor to a layout."""
    return 0 if tensor.is_contiguous(memory_format=layout) else nbytes(tensor)


_NEW = 32
"""Alignment of a tensor that was just allocated, as far as cuDNN is told."""


def _kept(*sizes: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size)


def _followed(copies: tuple[int, ...], workspace: WorkspaceEstimate) -> tuple[int, ...]:
    return copies + workspace.entries(len(copies))


# -- forward -------------------------------------------------------------------------------------------------


def _convolution(call: OpCall, first: int = 0) -> Convolution:
    """What ``convolution`` computes, of whose arguments ``convolution_backward`` has all, one place further on."""
    return Convolution(
        source=call.args[first],
        weight=call.args[first + 1],
        stride=call.argument(first + 3, "stride"),
        padding=call.argument(first + 4, "padding"),
        dilation=call.argument(first + 5, "dilation"),
        transposed=call.argument(first + 6, "transposed", False),
        output_padding=call.argument(first + 7, "output_padding", (0,)),
        groups=call.argument(first + 8, "groups", 1),
    )


def _forward_rule(call: OpCall) -> Extras | None:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    return _forward(_convolution(call), call.argument(2, "bias"), call.out, call.context)


def _forward(
    conv: Convolution,
    bias: torch.Tensor | None,
    outputs: torch.Tensor,
    ctx: KernelContext,
    zeros: int = 0,
) -> Extras | None:
    backend = conv.backend(ctx)
    if backend is ConvBackend.EMPTY:
        return None
    source, weight = conv.source, conv.weight
    if backend is ConvBackend.CUDNN:
        layout = conv.layout
        found = _workspace(
            conv, Pass.BACKWARD_DATA if conv.transposed else Pass.FORWARD, outputs, layout, ctx
        )
        return Extras(
            before=_kept(layout_copy(source, layout)),
            after=_followed(_kept(zeros, layout_copy(weight, layout)), found),
            error_bytes=found.above,
            error_below_bytes=found.below,
            choices=(found.choice,),
        )
    dense = torch.contiguous_format
    before, copy = _kept(layout_copy(source, dense)), layout_copy(weight, dense)
    if backend is ConvBackend.DEPTHWISE:
        return Extras(before=before, after=_kept(copy)) if before or copy else None
    columns = conv.columns(outputs.shape)
    ones = math.prod(outputs.shape[2:]) * source.element_size() if conv.transposed and bias is not None else 0
    parts = nbytes(outputs) if conv.groups > 1 else 0
    return Extras(before=before + _kept(copy, parts), after=_kept(columns, ones))


def _workspace(
    conv: Convolution,
    kind: Pass,
    outputs: torch.Tensor,
    layout: torch.memory_format,
    ctx: KernelContext,
) -> WorkspaceEstimate:
    """Workspace of one call of cuDNN, the search of benchmark mode before it included."""
    images = tuple(conv.source.shape), tuple(outputs.shape)
    shapes = Shapes(
        images=images[::-1] if conv.transposed else images,
        weight=tuple(conv.weight.shape),
        dtype=conv.source.dtype,
        channels_last=layout is not torch.contiguous_format,
        unit_stride=set(conv.stride) == {1} and set(conv.dilation) == {1},
        groups=conv.groups,
    )
    geometry = tuple(conv.padding), tuple(conv.stride), tuple(conv.dilation)
    if ctx.asker is not None:
        alignments = _alignments(conv, kind, outputs, layout)
        asked = asked_workspace(shapes, kind, geometry, alignments, ctx)
        if asked is not None:
            return asked
    found = estimate(shapes, kind, ctx)
    if not ctx.cudnn_benchmark:
        return found
    key = (threading.get_ident(), shapes, kind, geometry)  # plans belong to threads
    return searched(found, shapes, key, ctx)


def _alignments(
    conv: Convolution, kind: Pass, outputs: torch.Tensor, layout: torch.memory_format
) -> tuple[int, int, int]:
    """Alignments of what the filters read, of what they make, and of the filters; what is computed is new."""
    read, made = (outputs, conv.source) if conv.transposed else (conv.source, outputs)
    computed = {Pass.FORWARD: made, Pass.BACKWARD_DATA: read, Pass.BACKWARD_FILTER: conv.weight}[kind]
    x, y, w = (
        _NEW if tensor is computed or not tensor.is_contiguous(memory_format=layout) else alignment_of(tensor)
        for tensor in (read, made, conv.weight)
    )
    return x, y, w


# -- backward ------------------------------------------------------------------------------------------------


def _backward(call: OpCall) -> Extras | None:
    """``convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
    output_padding, groups, output_mask)``."""
    grad = call.args[0]
    conv = _convolution(call, first=1)
    backend = conv.backend(call.context)
    if backend is ConvBackend.EMPTY:
        return None
    summed = _bias_sums(grad, call.out[2], call.context)
    if backend is ConvBackend.CUDNN:
        return _cudnn_backward(conv, grad, call.out, summed, call.context)
    dense = torch.contiguous_format
    copies = _kept(layout_copy(grad, dense), layout_copy(conv.source, dense), layout_copy(conv.weight, dense))
    if backend is ConvBackend.DEPTHWISE:  # both gradients are made first, as recordings show
        parts = ((), copies, summed) if call.out[1] is not None else (copies, (), summed)
        return Extras(between=parts) if any(parts) else None
    before = copies
    columns = _kept(conv.columns(grad.shape))
    if conv.groups > 1:  # gradients of single groups, concatenated at the end
        before += _kept(*(0 if result is None else nbytes(result) for result in call.out[:2]))
    between = (
        columns if call.out[0] is not None else (),
        columns if call.out[1] is not None else (),
        summed,
    )
    return Extras(before=before, between=between) if before or any(between) else None


def _bias_sums(grad: torch.Tensor, result: torch.Tensor | None, ctx: KernelContext) -> tuple[int, ...]:
    """Buffers of the sum over all but the channels, once the gradients of input and filters are there."""
    if result is None:
        return ()
    found = reduce_extras(grad, [d for d in range(grad.dim()) if d != 1], max(4, grad.element_size()), ctx)
    return found.after if found is not None else ()


def _cudnn_backward(
    conv: Convolution, grad: torch.Tensor, outputs: Any, summed: tuple[int, ...], ctx: KernelContext
) -> Extras:
    """``cudnn_convolution_backward`` and ``cudnn_convolution_transpose_backward``."""
    layout = conv.layout
    source, weight = conv.source, conv.weight
    before = _kept(layout_copy(source, layout) if outputs[1] is not None else 0)
    input_layout = layout if outputs[1] is not None else suggest_memory_format(source)
    copied = suggest_memory_format(grad) is not input_layout
    if copied:  # brought to the input's layout for both gradients
        before += (nbytes(grad),)
    dense = input_layout is torch.contiguous_format
    taken = conv_layout(weight, weight) if dense else layout  # for the gradient of the input
    parts: list[tuple[int, ...]] = [(), (), summed]
    errors, choices = [(0, 0)] * len(parts), [""] * len(parts)
    if outputs[0] is not None:
        kind = Pass.FORWARD if conv.transposed else Pass.BACKWARD_DATA
        found = _workspace(conv, kind, grad, taken, ctx)
        copy = 0 if copied and input_layout is taken else layout_copy(grad, taken)
        parts[0] = _followed(_kept(layout_copy(weight, taken), copy), found)
        errors[0], choices[0] = (found.below, found.above), found.choice
    if outputs[1] is not None:
        found = _workspace(conv, Pass.BACKWARD_FILTER, grad, layout, ctx)
        copy = 0 if copied and input_layout is layout else layout_copy(grad, layout)
        parts[1] = _followed(_kept(copy), found)
        errors[1], choices[1] = (found.below, found.above), found.choice
    return Extras(
        before=before,
        between=tuple(parts),
        between_errors=tuple(errors),
        error_bytes=max(above for _, above in errors),
        error_below_bytes=max(below for below, _ in errors),
        choices=tuple(choices),
        until=1,  # copies are arguments of the call that makes both gradients; the bias is summed afterwards
    )


# -- ops that name their kernel ------------------------------------------------------------------------------


def _named(names: str, first: int, bias: int | None = None) -> Rule:
    """``cudnn_convolution`` and its transposed and fused forms.

    Args:
        names: their geometry in order, from the ``first``-th argument on.
        first: see ``names``.
        bias: which argument the bias is; a fused op makes zeros where it is missing.
    """
    order = names.split()

    def rule(call: OpCall) -> Extras | None:
        given = {name: call.argument(first + i, name) for i, name in enumerate(order)}
        conv = Convolution(
            source=call.args[0],
            weight=call.args[1],
            stride=given["stride"],
            padding=given["padding"],
            dilation=given["dilation"],
            transposed="output_padding" in given,
            output_padding=given.get("output_padding", (0,)),
            groups=given["groups"],
        )
        missing = bias is not None and call.argument(bias, "bias") is None
        zeros = call.out.shape[1] * call.out.element_size() if missing else 0
        # A fused op is a graph of four operations for cuDNN, for which it may choose other engines.
        ctx = call.context if bias is None else replace(call.context, asker=None)
        return _forward(conv, None, call.out, ctx, zeros)

    return rule


def multiplies_columns(call: OpCall) -> bool:
    """Whether ``convolution`` takes a kernel that multiplies columns with cuBLAS."""
    return _convolution(call).backend(call.context) in _BY_COLUMNS


def backward_multiplies_columns(call: OpCall) -> bool:
    """The same of ``convolution_backward``."""
    return _convolution(call, first=1).backend(call.context) in _BY_COLUMNS


_BY_COLUMNS = (ConvBackend.COLUMNS, ConvBackend.COLUMNS_TRANSPOSED)
RULES: dict[OpOverload, Rule] = table(
    {
        ("convolution", "_convolution"): _forward_rule,
        "convolution_backward": _backward,
        "cudnn_convolution": _named("padding stride dilation groups", 2),
        "cudnn_convolution_transpose": _named("padding output_padding stride dilation groups", 2),
        "cudnn_convolution_relu": _named("stride padding dilation groups", 3, bias=2),
        "cudnn_convolution_add_relu": _named("stride padding dilation groups", 5, bias=4),
    }
)
