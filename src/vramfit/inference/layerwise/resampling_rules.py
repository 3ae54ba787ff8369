"""Rules of what changes the number of rows: pooling, padding, interpolation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vramfit.inference.layerwise.conv_rules import each
from vramfit.inference.layerwise.row_calls import RowCall
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import RowTable
from vramfit.torch_internals.dispatch import disable_current_modes

POOLS = tuple(f"{kind}_pool{dims}d" for kind in ("max", "avg") for dims in (1, 2, 3))


def pool(call: RowCall) -> Any:
    """Maximum and mean over windows.

    Borders, rounding up and what a mean counts are left to torch: a chunk gets the function's own padding, and enough
    rows more that no window of its own meets a border that is not the tensor's.
    """
    tensor = call.argument(0, "input")
    spatial = int(call.name[-2])
    if not isinstance(tensor, RowTensor) or call.argument(6, "return_indices", False) is True:
        return NotImplemented
    tensor = call.session.with_axis(tensor, -spatial)
    is_max = call.name.startswith("max")
    size = each(call.argument(1, "kernel_size"), spatial)[0]
    stride = each(call.argument(2, "stride") or size, spatial)[0]
    padding = each(call.argument(3, "padding", 0), spatial)[0]
    dilation = each(call.argument(4, "dilation", 1), spatial)[0] if is_max else 1
    call.kwargs.pop("input", None)
    call.args = (tensor, *call.args[1:])
    like, node, func, axis = call.on_meta(), tensor.node, call.func, -spatial
    rest, kwargs, rows = call.args[1:], call.kwargs, node.rows
    more = -(-padding // stride)
    begins = np.maximum(np.arange(like.shape[axis], dtype=np.int64) - more, 0) * stride
    ends = np.arange(like.shape[axis], dtype=np.int64) * stride - padding + dilation * (size - 1)
    if call.name == "avg_pool3d":  # which alone takes no fewer rows than a window has, padding left out
        begins = np.minimum(begins, max(rows - size, 0) // stride * stride)
        ends = np.maximum(ends, begins + size - 1)
    window = RowTable(begins, np.maximum(ends, begins), rows)

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        made: torch.Tensor = func(parts[0], *rest, **kwargs)
        return made.narrow(axis, begin - starts[0] // stride, end - begin)

    return call.result(compute, like, [(node, window)], axis=axis, kept=True)


def pad(call: RowCall) -> Any:
    """Zeros, or copies of what is near or at the other border."""
    tensor, given = call.argument(0, "input"), list(call.argument(1, "pad"))
    if not isinstance(tensor, RowTensor):
        return NotImplemented
    mode, value = call.argument(2, "mode", "constant"), call.argument(3, "value")
    node, axis = tensor.node, tensor.node.axis
    if mode != "constant" and len(given) // 2 < -axis:
        # In these modes all spatial dimensions have pads: the rows are those of another dimension.
        return NotImplemented
    given += [0] * (2 * -axis - len(given))
    before, after = given[2 * (-axis - 1) : 2 * -axis]
    aside = [*given[: 2 * (-axis - 1)], 0, 0, *given[2 * -axis :]]
    call.args, call.kwargs = (tensor, given, mode, value), {}
    like, rows, func = call.on_meta(), node.rows, call.func
    places = np.arange(-before, rows + after, dtype=np.int64)
    source = _border(places, rows, mode)
    inside = (places >= 0) & (places < rows)

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        part = parts[0]
        if begin == 0 and end == len(places) and part.shape[axis] == rows:
            return func(part, given, mode, value)  # type: ignore[no-any-return]
        if any(aside):
            part = func(part, aside, mode, value)
        if inside[begin:end].all():
            return part.narrow(axis, int(source[begin]) - starts[0], end - begin)
        if mode != "constant":
            return _taken(part, axis, source[begin:end] - starts[0])
        low, high = max(begin - before, 0), min(end - before, rows)
        # A chunk may lie in the padding as a whole, beyond the one row that was read for it.
        part = part.narrow(axis, min(max(low - starts[0], 0), part.shape[axis]), max(high - low, 0))
        missing = [max(before - begin, 0), max(end - before - rows, 0)]
        if high <= low:
            missing = [0, end - begin]
        return F.pad(part, [*([0] * (2 * (-axis - 1))), *missing], value=value)

    return call.result(compute, like, [(node, RowTable(source, source, rows))], axis=axis)


def _border(places: npt.NDArray[np.int64], rows: int, mode: str) -> npt.NDArray[np.int64]:
    """The row that each place beyond the borders, and between them, is a copy of."""
    if mode == "reflect":
        places = np.abs(places)
        return np.where(places >= rows, 2 * (rows - 1) - places, places)
    if mode == "circular":
        return places % rows
    return np.clip(places, 0, rows - 1)


def _taken(rows: torch.Tensor, axis: int, places: npt.NDArray[np.int64]) -> torch.Tensor:
    index = torch.from_numpy(np.ascontiguousarray(places)).to(rows.device)
    return rows.index_select(axis, index)


_NEAREST = ("nearest", "nearest-exact")
_LINEAR = ("linear", "bilinear", "trilinear")


def interpolate(call: RowCall) -> Any:
    """Nearest and linear interpolation: rows by themselves, the other dimensions by torch."""
    tensor = call.argument(0, "input")
    mode, antialias = call.argument(3, "mode", "nearest"), call.argument(6, "antialias", False)
    if not isinstance(tensor, RowTensor) or antialias or mode not in (*_NEAREST, *_LINEAR):
        return NotImplemented
    spatial = len(tensor.node.outline.shape) - 2
    tensor = call.session.with_axis(tensor, -spatial)
    size, scale = call.argument(1, "size"), call.argument(2, "scale_factor")
    if isinstance(size, torch.Tensor) or isinstance(scale, torch.Tensor):
        return NotImplemented
    sizes = None if size is None else each(size, spatial)
    scales = None if scale is None else each_number(scale, spatial)
    shared = {
        "mode": mode,
        "align_corners": call.argument(4, "align_corners"),
        "recompute_scale_factor": call.argument(5, "recompute_scale_factor"),
    }
    call.args, call.kwargs = (tensor,), {"size": sizes, "scale_factor": scales, **shared}
    like, node, axis = call.on_meta(), tensor.node, -spatial
    dtype = node.outline.dtype
    taps = _taps(node.rows, dtype, sizes, scales, shared)
    window = RowTable(taps.near, taps.far, node.rows)
    wide = torch.float32 if dtype.itemsize < 4 and taps.weights is not None else dtype

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        part = parts.pop()
        if begin == 0 and end == len(taps.near) and part.shape[axis] == node.rows:
            return F.interpolate(part, size=sizes, scale_factor=scales, **shared)
        part = taps.rows_of(part.to(wide), axis, begin, end, starts[0])
        if spatial > 1:
            aside = None if sizes is None else (end - begin, *sizes[1:])
            factors = None if scales is None else (1.0, *scales[1:])
            part = F.interpolate(part, size=aside, scale_factor=factors, **shared)
        return part.to(dtype)

    return call.result(compute, like, [(node, window)], axis=axis)


def each_number(value: Any, count: int) -> tuple[float, ...]:
    """One factor for each dimension."""
    return (float(value),) * count if isinstance(value, int | float) else tuple(float(one) for one in value)


class _Taps:
    """The two rows that each output row lies between, and the weight of the second; None where one row is copied."""

    def __init__(
        self,
        near: npt.NDArray[np.int64],
        far: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float64] | None,
    ) -> None:
        self.near, self.far, self.weights = near, far, weights

    def rows_of(self, part: torch.Tensor, axis: int, begin: int, end: int, start: int) -> torch.Tensor:
        """Output rows of input rows from `start` on."""
        near = _taken(part, axis, self.near[begin:end] - start)
        if self.weights is None:
            return near
        far = _taken(part, axis, self.far[begin:end] - start)
        weights = torch.from_numpy(self.weights[begin:end]).to(dtype=part.dtype, device=part.device)
        return torch.lerp(near, far, weights.view(-1, *([1] * (-axis - 1))))


def row_taps(
    rows: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...] | None,
    scales: tuple[float, ...] | None,
    shared: dict[str, Any],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first and the last of the rows that each row of an interpolation along the first dimension lies between."""
    found = _taps(rows, dtype, sizes, scales, shared)
    return found.near, found.far


def _taps(
    rows: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...] | None,
    scales: tuple[float, ...] | None,
    shared: dict[str, Any],
) -> _Taps:
    """Ask torch's own function on the CPU which rows it reads: it interpolates the rows' numbers.

    The function works out places in the precision of its input, which a half of a row in a thousand can hang on. The
    weights are therefore read from alternating zeros and ones in that precision, which hold all of its digits.
    """
    count = len(sizes or scales or ())
    with disable_current_modes():
        precise = torch.float64 if dtype == torch.float64 else torch.float32

        def asked(values: torch.Tensor) -> npt.NDArray[np.float64]:
            column = values.view(1, 1, -1, *([1] * (count - 1)))
            made = F.interpolate(
                column,
                size=None if sizes is None else (sizes[0], *([1] * (count - 1))),
                scale_factor=None if scales is None else (scales[0], *([1.0] * (count - 1))),
                **shared,
            )
            return made.flatten().double().numpy()

        numbers = torch.arange(rows, dtype=precise if shared["mode"] in _NEAREST else torch.float64)
        places = asked(numbers)
        if shared["mode"] in _NEAREST:
            near = places.astype(np.int64)
            return _Taps(near, near, None)
        parity = asked((torch.arange(rows) % 2).to(precise))
        near = np.clip(np.floor(places), 0, rows - 1).astype(np.int64)
        weights = np.where(near % 2 == 0, parity, 1 - parity)
        return _Taps(near, np.minimum(near + 1, rows - 1), weights)
