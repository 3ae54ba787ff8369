"""Rules of norms and of means over all rows: statistics in one pass over the rows, values in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.inference.layerwise.pointwise_rules import along, along_rows, dims_of
from vramfit.inference.layerwise.row_calls import RowCall
from vramfit.inference.layerwise.row_nodes import LayerNode
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import RowTable, SameRows


class FoldNode(LayerNode):
    """What is found in one pass over all rows of a tensor.

    Args:
        fold: what to keep of some rows.
    """

    def __init__(self, node: LayerNode, height: int, fold: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(node.outline, [(node, SameRows(node.rows))], kept=True, height=height)
        self.fold = fold
        self.found: list[Any] = []
        self.counts: list[int] = []

    def step(self) -> None:
        """Look at the next rows."""
        begin, end = self.done, self.next_end()
        self.found.append(self.fold(self.edges[0].node.read(begin, end)))
        self.counts.append(end - begin)
        self.passed(end)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch computes with values of another."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def moments(call: RowCall, tensor: RowTensor, groups: int | None) -> FoldNode:
    """Mean and variance of groups of channels in each example, or of channels over all examples (None)."""

    def fold(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows.to(_precise(rows.dtype))
        if groups is None:
            dims = [dim for dim in range(rows.dim()) if dim != 1]
            variance, mean = torch.var_mean(rows, dims, correction=0)
        else:
            grouped = rows.unflatten(1, (groups, -1))
            variance, mean = torch.var_mean(grouped, list(range(2, grouped.dim())), correction=0)
        return mean, variance

    node = tensor.node
    return FoldNode(node, call.session.height_of(node.outline, [node]), fold)


def merged(fold: FoldNode) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all rows, in float64.

    Chunks' own are merged, not sums of squares, which would cancel: Chan, Golub and LeVeque, "Algorithms for computing
    the sample variance", The American Statistician 37 (1983).
    """
    means = torch.stack([mean for mean, _ in fold.found]).double()
    variances = torch.stack([variance for _, variance in fold.found]).double()
    total = sum(fold.counts)
    weights = torch.tensor([count / total for count in fold.counts], dtype=torch.float64)
    weights = weights.view(-1, *([1] * (means.dim() - 1))).to(means.device)
    mean = (means * weights).sum(0)
    variance = ((variances + (means - mean).square()) * weights).sum(0)
    return mean, variance


def _normalised(
    call: RowCall,
    tensor: RowTensor,
    groups: int | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    after: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> Any:
    """The tensor less its mean, divided by its deviation, weighed."""
    node, outline = tensor.node, tensor.node.outline
    # Laid out as its input, which is not what norms do on the meta device.
    like = torch.empty_strided(outline.shape, outline.strides, dtype=call.on_meta().dtype, device="meta")
    if after is None and call.session.height_of(node.outline, [node]) >= node.rows:
        return _at_once(call, tensor, like)
    fold = moments(call, tensor, groups)
    call.session.note_captured((weight, bias))
    channels, wide = like.shape[1], _precise(node.outline.dtype)
    factors: list[torch.Tensor] = []

    def prepare() -> None:
        mean, variance = merged(fold)
        if after is not None:
            after(mean, variance)
        scale = (variance + eps).rsqrt()
        if groups is not None:  # of each group to each of its channels
            each = (mean.shape[0], groups, channels // groups)
            mean, scale = (one.unsqueeze(-1).expand(each).reshape(-1, channels) for one in (mean, scale))
        if weight is not None:
            scale = scale * weight.double()
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.double()
        scale, shift = scale.to(wide), shift.to(wide)
        factors.extend((scale, shift, torch.ones_like(scale), torch.zeros_like(shift)))

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del begin, end, starts
        if not factors:
            prepare()
        return _scaled(parts.pop(), *factors)

    return call.result(compute, like, [(node, SameRows(node.rows))], axis=node.axis, needs=[fold])


def _scaled(
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, ones: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Rows times a factor and plus a summand for each channel of each example, or of all.

    Args:
        ones, zeros: of the same shape as both.
    """
    if scale.dim() == 1 or rows.shape[0] == 1 or rows.is_contiguous():
        # Batch norm with other figures for each example's channels is one kernel, and reads half precision as it is.
        flat = rows if scale.dim() == 1 else rows.reshape(1, -1, *rows.shape[2:])
        if rows.dtype == scale.dtype or rows.device.type == "cuda":
            zeros, ones, scale, shift = (one.flatten() for one in (zeros, ones, scale, shift))
            return F.batch_norm(flat, zeros, ones, scale, shift, training=False, eps=0.0).reshape(rows.shape)
    shape = (-1, rows.shape[1], *([1] * (rows.dim() - 2)))
    return torch.addcmul(shift.view(shape), rows.to(scale.dtype), scale.view(shape)).to(rows.dtype)


def _at_once(call: RowCall, tensor: RowTensor, like: torch.Tensor) -> Any:
    """By torch's own function: one chunk has all rows."""
    node = tensor.node
    made, axis = call.bound([tensor]), node.axis

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        whole: torch.Tensor = made(0, node.rows, parts, starts)
        return whole.narrow(axis, begin, end - begin)

    ends = np.full(node.rows, node.rows - 1)
    window = RowTable(np.zeros_like(ends), ends, node.rows)
    return call.result(compute, like, [(node, window)], axis=axis, kept=True)


def group_norm(call: RowCall) -> Any:
    """Statistics of groups of channels."""
    tensor = call.argument(0, "input")
    if not isinstance(tensor, RowTensor) or -tensor.node.axis > len(tensor.node.outline.shape) - 2:
        return NotImplemented
    groups = call.argument(1, "num_groups")
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    return _normalised(call, tensor, groups, weight, bias, call.argument(4, "eps", 1e-5))


def instance_norm(call: RowCall) -> Any:
    """Statistics of each channel of each example, or those that were collected in training."""
    tensor = call.argument(0, "input")
    if not isinstance(tensor, RowTensor) or len(tensor.node.outline.shape) < 3:
        return NotImplemented
    if not call.argument(5, "use_input_stats", True):
        return along_rows(call)
    if call.argument(1, "running_mean") is not None:
        return NotImplemented
    weight, bias = call.argument(3, "weight"), call.argument(4, "bias")
    channels = tensor.node.outline.shape[1]
    return _normalised(call, tensor, channels, weight, bias, call.argument(7, "eps", 1e-5))


def batch_norm(call: RowCall) -> Any:
    """What was collected in training, row by row; statistics of the batch in training mode."""
    tensor = call.argument(0, "input")
    if not isinstance(tensor, RowTensor) or len(tensor.node.outline.shape) < 3:
        return NotImplemented
    if not call.argument(5, "training", False):
        return along_rows(call)
    running_mean, running_var = call.argument(1, "running_mean"), call.argument(2, "running_var")
    momentum, eps = call.argument(6, "momentum", 0.1), call.argument(7, "eps", 1e-5)
    shape = tensor.node.outline.shape
    count = shape.numel() // shape[1]

    def update(mean: torch.Tensor, variance: torch.Tensor) -> None:
        for running, found in ((running_mean, mean), (running_var, variance * (count / max(1, count - 1)))):
            running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)

    after = update if running_mean is not None else None
    call.args = tuple(None if one is running_mean or one is running_var else one for one in call.args)
    call.kwargs |= {name: None for name in ("running_mean", "running_var") if name in call.kwargs}
    weight, bias = call.argument(3, "weight"), call.argument(4, "bias")
    return _normalised(call, tensor, None, weight, bias, eps, after=after)


def trailing_norm(call: RowCall) -> Any:
    """``layer_norm`` and ``rms_norm`` over dimensions behind the rows'."""
    tensor = call.argument(0, "input")
    shape = call.argument(1, "normalized_shape")
    if not isinstance(tensor, RowTensor) or len(call.tensors) > 1 or len(shape) >= -tensor.node.axis:
        return NotImplemented
    return along_rows(call)


# -- over all rows ------------------------------------------------------------------------------------------------

FOLDED = ("mean", "sum", "amax", "amin")
GLOBAL_POOLS = tuple(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3))


def folded(call: RowCall) -> Any:
    """A mean, a sum or an extreme over dimensions with the rows among them: found at once, in one pass."""
    tensor = call.args[0]
    if not isinstance(tensor, RowTensor) or len(call.tensors) > 1 or call.in_place is not None:
        return NotImplemented
    count = len(tensor.node.outline.shape)
    dims = dims_of(call)
    if dims is None:
        if len(call.args) > 1 or not {"keepdim"}.issuperset(call.kwargs) or not count:
            return NotImplemented
        dims = tuple(range(count))
    if count + tensor.node.axis not in dims:
        return along(call)
    if call.argument(3, "dtype") is not None or not tensor.node.outline.dtype.is_floating_point:
        return NotImplemented
    keep = bool(call.argument(2, "keepdim", False))
    return _folded(call, tensor, dims, call.name, keep=keep)


def global_pool(call: RowCall) -> Any:
    """A mean or maximum of everything, as adaptive pooling to one value."""
    tensor, size = call.argument(0, "input"), call.argument(1, "output_size")
    spatial = int(call.name[-2])
    wanted = (size,) if isinstance(size, int) else tuple(size)
    if not isinstance(tensor, RowTensor) or any(one != 1 for one in wanted):
        return NotImplemented
    if call.argument(2, "return_indices", False) or -tensor.node.axis > spatial:
        return NotImplemented
    name = "mean" if "avg" in call.name else "amax"
    return _folded(call, tensor, tuple(range(-spatial, 0)), name, keep=True)


def _folded(
    call: RowCall, tensor: RowTensor, dims: tuple[int, ...], name: str, *, keep: bool
) -> torch.Tensor:
    """The fold of all rows, computed now."""
    node, session = tensor.node, call.session
    shape = node.outline.shape
    summed = name in ("mean", "sum")

    def fold(rows: torch.Tensor) -> torch.Tensor:
        if summed:
            return rows.sum(dims, keepdim=keep, dtype=_precise(rows.dtype)).double()
        return rows.amax(dims, keepdim=keep) if name == "amax" else rows.amin(dims, keepdim=keep)

    found = FoldNode(node, session.height_of(node.outline, [node]), fold)
    session.produce(found)
    parts = torch.stack(found.found)
    if not summed:
        return parts.amax(0) if name == "amax" else parts.amin(0)
    total = parts.sum(0)
    if name == "mean":
        total = total / torch.Size(shape[dim] for dim in dims).numel()
    return total.to(node.outline.dtype)
