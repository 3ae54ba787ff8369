"""Which rows operations read, along any dimension: the rules of `vramfit.inference.structural_field`.

Rules of layer-wise chunks are for rows of the first spatial dimension, and say how to compute them; these only say what
is read. Sources are the shapes in torch's documentation of each function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from vramfit.inference.layerwise.conv_rules import each
from vramfit.inference.layerwise.resampling_rules import each_number, row_taps
from vramfit.inference.layerwise.row_calls import RowCall, Rule
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import RowTable, RowWindow, SameRows, sliding


def _never(*_: Any) -> NoReturn:
    raise AssertionError("structure is followed without computing")


def _made(call: RowCall, window: RowWindow, like: torch.Tensor | None = None) -> RowTensor:
    node = call.tensors[0].node
    return call.result(_never, call.on_meta() if like is None else like, [(node, window)], axis=node.axis)


def _place(tensor: Any, spatial: int) -> int | None:
    """The rows' place among the spatial dimensions; None where they are none."""
    if not isinstance(tensor, RowTensor):
        return None
    place = tensor.node.axis + spatial
    return place if 0 <= place < spatial else None


def _convolution(call: RowCall) -> Any:
    tensor, weight = call.argument(0, "input"), call.argument(1, "weight")
    spatial = weight.dim() - 2
    place = _place(tensor, spatial)
    if place is None or len(call.tensors) > 1:
        return NotImplemented
    stride = each(call.argument(3, "stride", 1), spatial)[place]
    dilation = each(call.argument(5, "dilation", 1), spatial)[place]
    reach = dilation * (weight.shape[2 + place] - 1)
    given = call.argument(4, "padding", 0)
    before = (
        {"valid": 0, "same": reach // 2}.get(given) if isinstance(given, str) else each(given, spatial)[place]
    )
    if before is None:
        return NotImplemented
    like = call.on_meta()
    rows, out = tensor.node.rows, like.shape[tensor.node.axis]
    return _made(call, sliding(rows, out, size=reach + 1, stride=stride, padding=before), like)


def _transposed(call: RowCall) -> Any:
    tensor, weight = call.argument(0, "input"), call.argument(1, "weight")
    spatial = weight.dim() - 2
    place = _place(tensor, spatial)
    if place is None or len(call.tensors) > 1:
        return NotImplemented
    stride = each(call.argument(3, "stride", 1), spatial)[place]
    padding = each(call.argument(4, "padding", 0), spatial)[place]
    dilation = each(call.argument(7, "dilation", 1), spatial)[place]
    like = call.on_meta()
    out = np.arange(like.shape[tensor.node.axis], dtype=np.int64) + padding
    first = -((dilation * (weight.shape[2 + place] - 1) - out) // stride)
    return _made(call, RowTable(first, out // stride, tensor.node.rows), like)


def _pool(call: RowCall) -> Any:
    tensor = call.argument(0, "input")
    spatial = int(next(one for one in call.name if one.isdigit()))
    place = _place(tensor, spatial)
    if place is None:
        return NotImplemented
    size = each(call.argument(1, "kernel_size"), spatial)[place]
    given = call.argument(2, "stride")
    stride = each(given, spatial)[place] if given not in (None, [], ()) else size
    padding = each(call.argument(3, "padding", 0), spatial)[place]
    dilation = each(call.argument(4, "dilation", 1), spatial)[place] if "max" in call.name else 1
    found = call.on_meta()
    parts = list(found) if isinstance(found, tuple) else [found]
    reach = dilation * (size - 1) + 1
    out = parts[0].shape[tensor.node.axis]
    window = sliding(tensor.node.rows, out, size=reach, stride=stride, padding=padding)
    made = tuple(_made(call, window, part) for part in parts)
    return made if isinstance(found, tuple) else made[0]


def _unpool(call: RowCall) -> Any:
    """Values go back to the places that the pooling noted, inside of their window."""
    tensor = call.argument(0, "input")
    spatial = int(next(one for one in call.name if one.isdigit()))
    place = _place(tensor, spatial)
    if place is None or len({one.node.axis for one in call.tensors}) > 1:
        return NotImplemented
    size = each(call.argument(2, "kernel_size"), spatial)[place]
    given = call.argument(3, "stride")
    stride = each(given, spatial)[place] if given not in (None, [], ()) else size
    padding = each(call.argument(4, "padding", 0), spatial)[place]
    like = call.on_meta()
    axis = tensor.node.axis
    out = np.arange(like.shape[axis], dtype=np.int64) + padding
    window = RowTable(-((size - 1 - out) // stride), out // stride, tensor.node.rows)
    return call.result(_never, like, [(one.node, window) for one in call.tensors], axis=axis)


def _interpolate(call: RowCall) -> Any:
    tensor = call.argument(0, "input")
    if not isinstance(tensor, RowTensor) or call.argument(6, "antialias", False):
        return NotImplemented
    if call.argument(4, "align_corners"):  # the weights depend on the extent
        return NotImplemented
    spatial = len(tensor.node.outline.shape) - 2
    place, mode = _place(tensor, spatial), call.argument(3, "mode", "nearest")
    wider = {"nearest": 0, "nearest-exact": 0, "linear": 0, "bilinear": 0, "trilinear": 0, "bicubic": 1}.get(
        mode
    )
    size, scale = call.argument(1, "size"), call.argument(2, "scale_factor")
    if place is None or wider is None or isinstance(size, torch.Tensor) or isinstance(scale, torch.Tensor):
        return NotImplemented
    shared = {
        "mode": "bilinear" if mode == "bicubic" else mode,
        "align_corners": call.argument(4, "align_corners"),
        "recompute_scale_factor": call.argument(5, "recompute_scale_factor"),
    }
    sizes = None if size is None else (each(size, spatial)[place], *([1] * (spatial - 1)))
    scales = None if scale is None else (each_number(scale, spatial)[place], *([1.0] * (spatial - 1)))
    near, far = row_taps(tensor.node.rows, tensor.node.outline.dtype, sizes, scales, shared)
    return _made(call, RowTable(near - wider, far + wider, tensor.node.rows))


def _shuffle(call: RowCall) -> Any:
    tensor, factor = call.argument(0, "input"), call.argument(1, "upscale_factor")
    if _place(tensor, 2) is None:
        return NotImplemented
    like = call.on_meta()
    rows = np.arange(like.shape[tensor.node.axis], dtype=np.int64) // factor
    return _made(call, RowTable(rows, rows, tensor.node.rows), like)


def _unshuffle(call: RowCall) -> Any:
    tensor, factor = call.argument(0, "input"), call.argument(1, "downscale_factor")
    if _place(tensor, 2) is None:
        return NotImplemented
    like = call.on_meta()
    rows = np.arange(like.shape[tensor.node.axis], dtype=np.int64) * factor
    return _made(call, RowTable(rows, rows + factor - 1, tensor.node.rows), like)


def _repeat(call: RowCall) -> Any:
    tensor = call.args[0]
    given = call.args[1:] or (call.kwargs.get("repeats"),)
    sizes = tuple(given[0]) if isinstance(given[0], Sequence) else tuple(given)
    if not isinstance(tensor, RowTensor) or len(sizes) < -tensor.node.axis or sizes[tensor.node.axis] != 1:
        return NotImplemented
    return _made(call, SameRows(tensor.node.rows))


def _norm(note: Callable[[str], None]) -> Rule:
    def rule(call: RowCall) -> Any:
        tensor = call.argument(0, "input")
        if not isinstance(tensor, RowTensor) or len(call.tensors) > 1:
            return NotImplemented
        if call.name == "batch_norm":
            training = call.argument(5, "training", False)
        else:
            training = call.name != "instance_norm" or call.argument(5, "use_input_stats", True)
        if training:
            note(call.name)
        return _made(call, SameRows(tensor.node.rows))

    return rule


def structural_rules(note_norm: Callable[[str], None]) -> dict[str, Rule]:
    """The rules by the names of functions.

    Args:
        note_norm: called with the name of a norm that takes statistics over all rows.
    """
    found: dict[str, Rule] = {}
    for dims in (1, 2, 3):
        found[f"conv{dims}d"] = _convolution
        found[f"conv_transpose{dims}d"] = _transposed
        found[f"max_unpool{dims}d"] = _unpool
        for kind in ("max", "avg"):
            found[f"{kind}_pool{dims}d"] = _pool
        found[f"max_pool{dims}d_with_indices"] = _pool
    found |= {"interpolate": _interpolate, "pixel_shuffle": _shuffle, "pixel_unshuffle": _unshuffle}
    found |= {"repeat": _repeat, "tile": _repeat}
    return found | dict.fromkeys(("group_norm", "instance_norm", "batch_norm"), _norm(note_norm))
