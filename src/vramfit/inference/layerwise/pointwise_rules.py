"""Rules of operations whose rows are made of the same rows alone: pointwise ones, and those along other dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.inference.layerwise.row_calls import RowCall, casted
from vramfit.inference.layerwise.row_tensors import RowTensor
from vramfit.inference.layerwise.row_windows import SameRows
from vramfit.torch_internals.dispatch import parse_to

_POINTWISE_WORDS = """
abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
reciprocal pow float_power sin cos tan sinh cosh tanh asin acos atan atan2 asinh acosh atanh sigmoid
erf erfc erfinv floor ceil round trunc frac fix relu relu6 silu gelu mish elu selu celu leaky_relu
hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink softsign softplus logsigmoid
threshold logit sinc nan_to_num clamp clip clamp_min clamp_max add sub subtract rsub mul
multiply div divide true_divide floor_divide fmod remainder maximum minimum fmax fmin where lerp
addcmul addcdiv masked_fill eq ne lt le gt ge not_equal greater less greater_equal less_equal
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isnan isinf
isfinite clone zeros_like ones_like full_like heaviside hypot copysign xlogy __add__
__radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__
__rfloordiv__ __mod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__ __and__ __or__ __xor__ __invert__
"""
POINTWISE = tuple(_POINTWISE_WORDS.split())
"""Functions whose tensors are broadcast against each other."""

CHANNELWISE = ("prelu", "channel_shuffle", "native_channel_shuffle")
"""Functions that combine or weigh channels; their other tensors have no rows."""

_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}
CASTS = tuple(_TYPES)


def pointwise(call: RowCall) -> Any:
    """Any function of `POINTWISE`."""
    tensors = call.tensors
    axis = max((tensor.node for tensor in tensors), key=lambda node: node.rows).axis
    rows = max(tensor.node.rows for tensor in tensors)

    call.args = tuple(_aligned(value, call, axis, rows) for value in call.args)
    call.kwargs = {name: _aligned(value, call, axis, rows) for name, value in call.kwargs.items()}
    return along_rows(call)


def _aligned(value: Any, call: RowCall, axis: int, rows: int) -> Any:
    """An argument by rows where it has as many; as it is where it has one row, or none, for all."""
    if isinstance(value, RowTensor):
        if value.node.axis == axis and value.node.rows == rows:
            return value
        value = value.whole()
    if isinstance(value, torch.Tensor):
        has_rows = rows > 1 and value.dim() >= -axis and value.shape[axis] == rows
        return call.session.tensor_of(value, axis) if has_rows else value
    if type(value) in (list, tuple):
        return type(value)(_aligned(item, call, axis, rows) for item in value)
    return value


def along_rows(call: RowCall, axis: int | None = None) -> Any:
    """A function that makes each row of the same row of its tensors by itself; its plain tensors have no rows.

    Args:
        axis: of the result; None is that of the first tensor.
    """
    like, tensors = call.on_meta(), call.tensors
    first = tensors[0].node
    axis = first.axis if axis is None else axis
    if isinstance(like, torch.Tensor):
        if like.dim() < -axis or like.shape[axis] != first.rows:
            return NotImplemented
        return call.same_rows(call.bound(tensors), like, axis=axis)
    if not isinstance(like, tuple | list) or call.in_place is not None:
        return NotImplemented
    compute = call.bound(tensors)
    found = [call.same_rows(_nth(compute, index), part, axis=axis) for index, part in enumerate(like)]
    return type(like)(found) if type(like) in (tuple, list) else type(like)(tuple(found))


def _nth(compute: Callable[..., Any], index: int) -> Callable[..., Any]:
    return lambda *arguments: compute(*arguments)[index]


def itself(call: RowCall) -> Any:
    """The tensor, as functions give it that have nothing to do."""
    return call.args[0] if isinstance(call.args[0], RowTensor) else NotImplemented


def dropout(call: RowCall) -> Any:
    """The tensor, where nothing is dropped; what is drawn is drawn for the whole tensor."""
    training = call.argument(2, "training", True)
    return NotImplemented if training and call.argument(1, "p", 0.5) else itself(call)


def cast(call: RowCall) -> Any:
    """``half()`` and its like."""
    tensor, dtype = call.args[0], _TYPES[call.name]
    if tensor.node.outline.dtype == dtype:
        return tensor
    return along_rows(call)


def to(call: RowCall) -> Any:
    """``to(dtype)``, ``type(dtype)`` and ``type_as(other)`` on the same device."""
    tensor = call.args[0]
    if not isinstance(tensor, RowTensor):
        return NotImplemented
    outline = tensor.node.outline
    dtype: torch.dtype | None
    if call.name == "to":
        others = [
            value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, torch.Tensor)
        ]
        if others:
            device, dtype, copy = others[0].device, others[0].dtype, False
        else:
            device, dtype, _, _ = parse_to(
                *call.args[1:], **{key: value for key, value in call.kwargs.items() if key != "copy"}
            )
            copy = bool(call.kwargs.get("copy"))
        if copy or (device is not None and not _is_same(device, outline.device)):
            return NotImplemented
    else:
        wanted = call.argument(1, "dtype" if call.name == "type" else "other")
        dtype = wanted.dtype if isinstance(wanted, torch.Tensor) else wanted
        if not isinstance(dtype, torch.dtype):
            return NotImplemented
    if dtype is None or dtype == outline.dtype:
        return tensor
    if dtype.is_floating_point and outline.dtype.is_floating_point and outline.dtype != torch.float64:
        return casted(call.session, tensor, dtype)
    call.func, call.args, call.kwargs = torch.Tensor.to, (tensor, dtype), {}
    return along_rows(call)


def _is_same(device: torch.device, own: torch.device) -> bool:
    return device.type == own.type and device.index in (None, own.index)


def contiguous(call: RowCall) -> Any:
    """The tensor where its strides are those already."""
    tensor = call.args[0]
    wanted = call.argument(1, "memory_format", torch.contiguous_format)
    outline = tensor.node.outline
    meta = torch.empty_strided(outline.shape, outline.strides, dtype=outline.dtype, device="meta")
    return tensor if meta.is_contiguous(memory_format=wanted) else along_rows(call)


def linear(call: RowCall) -> Any:
    """A product along the last dimension, computed once for each row."""
    tensor = call.args[0]
    if not isinstance(tensor, RowTensor) or tensor.node.axis == -1 or len(call.tensors) > 1:
        return NotImplemented
    node = tensor.node
    return call.result(
        call.bound([tensor]), call.on_meta(), [(node, SameRows(node.rows))], axis=node.axis, kept=True
    )


# -- along other dimensions ---------------------------------------------------------------------------------------

_DIM_PLACES = {
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "normalize": 2,
    "cumsum": 1,
    "argmax": 1,
    "argmin": 1,
    "max": 1,
    "min": 1,
    "mean": 1,
    "sum": 1,
    "amax": 1,
    "amin": 1,
    "prod": 1,
    "var": 1,
    "std": 1,
    "logsumexp": 1,
    "glu": 1,
    "any": 1,
    "all": 1,
    "topk": 2,
}
_DIM_DEFAULTS = {"normalize": 1, "glu": -1, "topk": -1}
ALONG = tuple(_DIM_PLACES)


def dims_of(call: RowCall) -> tuple[int, ...] | None:
    """The dimensions, from 0 on, that a function of `ALONG` works along; None for all, or where it is not clear."""
    if not isinstance(call.args[0], RowTensor):
        return None
    place = _DIM_PLACES[call.name]
    default = _DIM_DEFAULTS.get(call.name)
    given = call.kwargs.get("axis", call.argument(place, "dim", default))
    count = len(call.args[0].node.outline.shape)
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if not isinstance(given, list | tuple) or not given:
        return None
    return tuple(sorted({dim % count for dim in given}))


def along(call: RowCall) -> Any:
    """A reduction or a softmax along dimensions that are not the rows'."""
    dims = dims_of(call)
    if dims is None or len(call.tensors) > 1:
        return NotImplemented
    node = call.args[0].node
    count = len(node.outline.shape)
    row = count + node.axis
    if row in dims:
        return NotImplemented
    like = call.on_meta()
    first = like if isinstance(like, torch.Tensor) else like[0]
    gone = sum(dim > row for dim in dims) if first.dim() < count else 0
    return along_rows(call, node.axis + gone)
