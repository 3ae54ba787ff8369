"""Rules of functions that only name, order, cut or join dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vramfit.inference.layerwise.pointwise_rules import along_rows
from vramfit.inference.layerwise.row_calls import RowCall
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import RowTable, SameRows


def _views(call: RowCall, found: Any) -> Any:
    """Note that results are views of the call's tensor."""
    for tensor in found if isinstance(found, tuple | list) else (found,):
        if isinstance(tensor, RowTensor) and tensor is not call.args[0]:
            tensor.share(call.args[0])
    return found


def _row(tensor: RowTensor) -> int:
    """The dimension of the rows, from 0 on."""
    return len(tensor.node.outline.shape) + tensor.node.axis


def permute(call: RowCall) -> Any:
    """``permute``, ``transpose`` and ``swapaxes``: rows stay whole."""
    tensor = call.args[0]
    if not isinstance(tensor, RowTensor):
        return NotImplemented
    count = len(tensor.node.outline.shape)
    if call.name == "permute":
        given = call.args[1:] if len(call.args) > 1 else (call.kwargs["dims"],)
        order = given[0] if isinstance(given[0], list | tuple | torch.Size) else given
        place = [dim % count for dim in order].index(_row(tensor))
    else:
        first = call.argument(1, "dim0", call.kwargs.get("axis0")) % count
        second = call.argument(2, "dim1", call.kwargs.get("axis1")) % count
        place = {first: second, second: first}.get(_row(tensor), _row(tensor))
    return _views(call, along_rows(call, place - count))


def reshape(call: RowCall) -> Any:
    """Views that leave the dimensions from the rows' on as they are, and group those before it."""
    tensor = call.args[0]
    if not isinstance(tensor, RowTensor):
        return NotImplemented
    if call.name == "view" and len(call.args) == 2 and isinstance(call.args[1], torch.dtype):
        return NotImplemented
    like, node = call.on_meta(), tensor.node
    tail = tuple(node.outline.shape[node.axis :])
    if like.dim() < -node.axis or tuple(like.shape[node.axis :]) != tail:
        return NotImplemented
    head, rest = tuple(like.shape[: node.axis]), tail[1:]
    if tuple(like.shape) == tuple(node.outline.shape):
        return tensor

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del starts
        return parts[0].reshape(*head, end - begin, *rest)

    return _views(call, call.same_rows(compute, like))


def unsqueeze(call: RowCall) -> Any:
    """A dimension of one more."""
    tensor = call.args[0]
    count, row = len(tensor.node.outline.shape), _row(tensor)
    dim = call.argument(1, "dim") % (count + 1)
    return _views(call, along_rows(call, (row + (dim <= row)) - (count + 1)))


def squeeze(call: RowCall) -> Any:
    """A named dimension of one less."""
    tensor, dim = call.args[0], call.argument(1, "dim")
    count, row = len(tensor.node.outline.shape), _row(tensor)
    if not isinstance(dim, int) or dim % count == row:
        return NotImplemented
    gone = int(tensor.node.outline.shape[dim] == 1)
    place = row - (gone and dim % count < row)
    return _views(call, along_rows(call, place - (count - gone)))


def split(call: RowCall) -> Any:
    """``chunk``, ``split``, ``tensor_split`` along channels or others, not along the rows."""
    tensor = call.args[0]
    dim = call.argument(2, "dim", 0)
    if not isinstance(tensor, RowTensor) or dim % len(tensor.node.outline.shape) == _row(tensor):
        return NotImplemented
    return _views(call, along_rows(call))


def unbind(call: RowCall) -> Any:
    """``unbind`` and ``select`` along what is not the rows."""
    tensor = call.args[0]
    dim = call.argument(1, "dim", 0)
    count = len(tensor.node.outline.shape)
    if not isinstance(dim, int) or dim % count == _row(tensor):
        return NotImplemented
    place = _row(tensor) - (dim % count < _row(tensor))
    return _views(call, along_rows(call, place - (count - 1)))


def narrow(call: RowCall) -> Any:
    """Rows from one on, or a part of another dimension."""
    tensor, dim = call.args[0], call.argument(1, "dim")
    start, length = call.argument(2, "start"), call.argument(3, "length")
    if not isinstance(start, int):
        return NotImplemented
    if dim % len(tensor.node.outline.shape) != _row(tensor):
        return _views(call, along_rows(call))
    rows = tensor.node.rows
    return _cropped(call, call.on_meta(), start % rows if start else 0, length)


def _cropped(call: RowCall, like: torch.Tensor, first: int, count: int, index: Any = None) -> Any:
    """Rows from `first` on; of the other dimensions what an index takes."""
    node = call.args[0].node
    if not count:
        return NotImplemented

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del begin, end, starts
        return parts[0] if index is None else parts[0][index]

    window = SameRows(node.rows, first=first, count=count)
    axis = node.axis
    return _views(call, call.result(compute, like, [(node, window)], axis=axis, kept=False))


def getitem(call: RowCall) -> Any:
    """Parts by slices and numbers; of the rows a slice of step 1."""
    tensor, index = call.args
    if not isinstance(tensor, RowTensor):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    count, row = len(tensor.node.outline.shape), _row(tensor)
    if any(not isinstance(one, int | slice | type(...)) or isinstance(one, bool) for one in index):
        return NotImplemented
    if sum(one is ... for one in index) > 1:
        return NotImplemented
    if ... in index:
        place = index.index(...)
        filled = count - (len(index) - 1)
        index = (*index[:place], *([slice(None)] * filled), *index[place + 1 :])
    index = (*index, *([slice(None)] * (count - len(index))))
    rows = index[row]
    if not isinstance(rows, slice):
        return NotImplemented
    try:
        first, last, step = rows.indices(tensor.node.rows)
    except TypeError:  # bounds that are tensors
        return NotImplemented
    if step != 1 or last <= first:
        return NotImplemented
    others = (*index[:row], slice(None), *index[row + 1 :])
    # Each number takes its dimension away; the rows are counted from the last one.
    axis = tensor.node.axis + sum(isinstance(one, int) for one in index[row + 1 :])
    like = call.on_meta()
    window = SameRows(tensor.node.rows, first=first, count=last - first)

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del begin, end, starts
        return parts[0][others]

    return _views(call, call.result(compute, like, [(tensor.node, window)], axis=axis, kept=False))


def cat(call: RowCall) -> Any:
    """Tensors beside each other, along what is not the rows."""
    given: Sequence[Any] = call.argument(0, "tensors")
    dim = call.kwargs.get("axis", call.argument(1, "dim", 0))
    first = call.tensors[0]
    axis, rows, count = first.node.axis, first.node.rows, len(first.node.outline.shape)
    if dim % count == count + axis or any(len(one.shape) != count for one in given):
        return NotImplemented
    joined = [
        call.session.with_axis(one, axis) if isinstance(one, RowTensor) else call.session.tensor_of(one, axis)
        for one in given
    ]
    if any(one.node.rows != rows for one in joined):
        return NotImplemented
    call.args, call.kwargs = (joined, dim), {}
    return along_rows(call)


def pixel_shuffle(call: RowCall) -> Any:
    """Channels become rows and columns."""
    tensor, factor = call.args[0], call.argument(1, "upscale_factor")
    tensor = call.session.with_axis(tensor, -2)
    call.args = (tensor, factor)
    call.kwargs = {}
    like, node, func = call.on_meta(), tensor.node, call.func
    rows = [row // factor for row in range(like.shape[-2])]

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        made: torch.Tensor = func(parts[0], factor)
        return made.narrow(-2, begin - starts[0] * factor, end - begin)

    return call.result(compute, like, [(node, RowTable(rows, rows, node.rows))], axis=-2)


def pixel_unshuffle(call: RowCall) -> Any:
    """Rows and columns become channels."""
    tensor, factor = call.args[0], call.argument(1, "downscale_factor")
    tensor = call.session.with_axis(tensor, -2)
    call.args = (tensor, factor)
    call.kwargs = {}
    like, node, func = call.on_meta(), tensor.node, call.func
    first = [row * factor for row in range(like.shape[-2])]
    last = [row + factor - 1 for row in first]

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del begin, end, starts
        made: torch.Tensor = func(parts[0], factor)
        return made

    return call.result(compute, like, [(node, RowTable(first, last, node.rows))], axis=-2)
