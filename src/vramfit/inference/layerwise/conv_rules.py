"""Rules of convolutions and transposed convolutions: each row of the output is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.inference.layerwise.row_calls import RowCall
from vramfit.inference.layerwise.row_nodes import LayerNode, Outline
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import RowTable, sliding


def each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each dimension, of a number for all or of several."""
    if isinstance(value, int):
        return (value,) * count
    found = tuple(value)
    return found * count if len(found) == 1 else found


def convolution(call: RowCall) -> Any:
    """``conv1d`` to ``conv3d``: rows with the neighbours that the filter reaches, zeros beyond the border."""
    tensor, weight = call.argument(0, "input"), call.argument(1, "weight")
    if not isinstance(tensor, RowTensor) or len(call.tensors) > 1:
        return NotImplemented
    spatial = weight.dim() - 2
    tensor = call.session.with_axis(tensor, -spatial)
    stride, dilation = (each(call.argument(place, name, 1), spatial) for place, name in _STEPS)
    reach = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    pads = _pads(call.argument(4, "padding", 0), reach, spatial)
    if pads is None:
        return NotImplemented
    bias, groups = call.argument(2, "bias"), call.argument(6, "groups", 1)
    func, padding = call.func, call.argument(4, "padding", 0)
    call.args, call.kwargs = (tensor, weight, bias, stride, padding, dilation, groups), {}
    like, node = _laid_out(call.on_meta(), tensor.node), tensor.node
    call.session.note_captured((weight, bias))
    axis, rows, out = -spatial, node.rows, like.shape[-spatial]
    even = all(before == after for before, after in pads[1:])
    aside = [0] * (spatial - 1) if not even else [before for before, _ in pads[1:]]
    edges = [] if even else [side for pair in reversed(pads[1:]) for side in pair]
    window = sliding(rows, out, size=reach[0] + 1, stride=stride[0], padding=pads[0][0])

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        part = parts.pop()
        if begin == 0 and end == out and part.shape[axis] == rows:
            return func(part, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        first = begin * stride[0] - pads[0][0]
        last = (end - 1) * stride[0] - pads[0][0] + reach[0] + 1
        low, high = min(max(first, 0), rows), max(min(last, rows), 0)
        if (low, max(high - low, 0)) != (starts[0], part.shape[axis]):
            part = part.narrow(axis, max(low - starts[0], 0), max(high - low, 0))
        missing = [max(low - first, 0), max(last - high, 0)] if low < high else [0, last - first]
        if any(missing) or edges:
            part = F.pad(part, [*(edges or [0] * (2 * spatial - 2)), *missing])
        return func(part, weight, bias, stride, (0, *aside), dilation, groups)  # type: ignore[no-any-return]

    return call.result(compute, like, [(node, window)], axis=axis, kept=True)


_STEPS = ((3, "stride"), (5, "dilation"))
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _laid_out(like: torch.Tensor, node: LayerNode) -> torch.Tensor:
    """The shape of an output with its channels innermost where the input's are: on the meta device they are not."""
    order = _LAST.get(like.dim())
    if order is None or len(node.outline.shape) != like.dim():
        return like
    given = torch.empty_strided(node.outline.shape, node.outline.strides, device="meta")
    if given.is_contiguous() or not given.is_contiguous(memory_format=order):
        return like
    return like.contiguous(memory_format=order)


def _pads(given: Any, reach: Sequence[int], spatial: int) -> list[tuple[int, int]] | None:
    """Zeros before and after, in each dimension; torch puts the odd one of ``same`` after."""
    if given == "valid":
        return [(0, 0)] * spatial
    if given == "same":
        return [(total // 2, total - total // 2) for total in reach]
    if isinstance(given, str):
        return None
    return [(size, size) for size in each(given, spatial)]


def transposed_convolution(call: RowCall) -> Any:
    """``conv_transpose1d`` to ``conv_transpose3d``: each input row is multiplied once, and overlaps are added."""
    tensor, weight = call.argument(0, "input"), call.argument(1, "weight")
    if not isinstance(tensor, RowTensor) or len(call.tensors) > 1:
        return NotImplemented
    spatial = weight.dim() - 2
    tensor = call.session.with_axis(tensor, -spatial)
    bias, groups = call.argument(2, "bias"), call.argument(6, "groups", 1)
    stride, padding, output_padding, dilation = (
        each(call.argument(place, name, default), spatial) for place, name, default in _TRANSPOSED_STEPS
    )
    func = call.func
    call.args = (tensor, weight, bias, stride, padding, output_padding, groups, dilation)
    call.kwargs = {}
    like = call.on_meta()
    call.session.note_captured((weight, bias))

    def whole(rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(rows, weight, bias, stride, padding, output_padding, groups, dilation)
        return made

    def raw(rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(
            rows, weight, None, stride, (0, *padding[1:]), (0, *output_padding[1:]), groups, dilation
        )
        return made

    outline = Outline(
        shape=like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=tensor.node.outline.device,
        axis=-spatial,
    )
    node = TransposedNode(outline, tensor.node, stride=stride[0], padding=padding[0])
    node.whole, node.raw = whole, raw
    node.bias = None if bias is None else bias.view(-1, *([1] * spatial))
    node.height = call.session.height_of(outline, [tensor.node])
    node.shelf.store = call.session.store
    if call.in_place is not None:
        return NotImplemented
    return RowTensor(node, call.session)


_TRANSPOSED_STEPS = (
    (3, "stride", 1),
    (4, "padding", 0),
    (5, "output_padding", 0),
    (7, "dilation", 1),
)


class TransposedNode(LayerNode):
    """A transposed convolution: rows of the input are scattered, and what reaches beyond a chunk is added to the next.

    Attributes:
        whole: the function on all rows.
        raw: the function without bias, padding and output padding along the rows.
    """

    whole: Any
    raw: Any
    bias: torch.Tensor | None

    def __init__(self, outline: Outline, node: LayerNode, *, stride: int, padding: int) -> None:
        # An output row is complete with the last input row that reaches it; it then reads on from the one after the
        # last that was read for the rows before.
        last = np.minimum((np.arange(outline.rows, dtype=np.int64) + padding) // stride, node.rows - 1)
        first = np.concatenate(([0], np.minimum(last[:-1] + 1, node.rows - 1)))
        super().__init__(outline, [(node, RowTable(np.minimum(first, last), last, node.rows))], kept=True)
        self.stride, self.padding = stride, padding
        self._last = last
        self._read = 0
        self._carry: torch.Tensor | None = None

    def next_end(self) -> int:
        """The end of the rows that are complete with the next input rows."""
        wanted = min(self.done + self.height, self.rows)
        if wanted == self.rows:
            return wanted
        upto = int(self._last[wanted - 1])
        if upto >= self.edges[0].node.rows - 1:
            return self.rows
        return int(np.searchsorted(self._last, upto + 1))

    def make(self, begin: int, end: int) -> torch.Tensor:
        """The next rows; they come in order, each once."""
        source = self.edges[0].node
        if begin == 0 and end == self.rows:
            return self.whole(source.read(0, source.rows))  # type: ignore[no-any-return]
        first = self._read
        self._read = source.rows if end == self.rows else int(self._last[end - 1]) + 1
        made = self.raw(source.read(first, self._read))
        origin = first * self.stride
        if self._carry is not None:
            made = _longer(made, self.axis, self._carry.shape[self.axis])
            made.narrow(self.axis, 0, self._carry.shape[self.axis]).add_(self._carry)
            self._carry = None
        made = _longer(made, self.axis, end + self.padding - origin)
        rest = made.shape[self.axis] - (end + self.padding - origin)
        if rest and end < self.rows:
            self._carry = made.narrow(self.axis, end + self.padding - origin, rest).clone()
        found = made.narrow(self.axis, begin + self.padding - origin, end - begin)
        return found if self.bias is None else found.add_(self.bias)


def _longer(rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """The rows with zeros after them, so that there are as many."""
    missing = count - rows.shape[axis]
    return rows if missing <= 0 else F.pad(rows, [*([0] * (2 * (-axis - 1))), 0, missing])
