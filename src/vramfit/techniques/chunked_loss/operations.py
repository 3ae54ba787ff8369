"""What operations do to deferred logits. See NOTE [Deferred logits]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from vramfit.techniques.chunked_loss import cross_entropy
from vramfit.techniques.chunked_loss.deferred import (
    Casting,
    Chunking,
    DeferredLogits,
    LogitsFamily,
    LogitsRecipe,
    deferred_in,
    looked_at,
    real,
)
from vramfit.torch_internals.dispatch import DisableTorchFunctionSubclass, parse_to

_Handler: TypeAlias = Callable[..., Any]


def defer(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunking: Chunking
) -> DeferredLogits:
    """What ``F.linear(hidden, weight, bias)`` would give, deferred."""
    casting = Casting.now(hidden.device.type)
    family = LogitsFamily(
        hidden=hidden, weight=weight, bias=bias, casting=casting, chunking=chunking, run=call
    )
    family.versions = tuple(tensor._version for tensor in family.inputs)
    shape = (*hidden.shape[:-1], weight.shape[0])
    recipe = LogitsRecipe(rows=hidden, shape=shape, dtype=casting.of(weight.dtype), class_dim=len(shape) - 1)
    return DeferredLogits.make(family, recipe, None)


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has deferred logits among its arguments."""
    if func in _KNOWN_BEFORE or (func in _GRAPH and args[0].full is None):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not args and isinstance(kwargs.get("input"), DeferredLogits):
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    first = args[0] if args else None
    if isinstance(first, DeferredLogits) and first.full is None:
        found: Any = NotImplemented
        if handler := _HANDLERS.get(func):
            found = handler(func, first, *args[1:], **kwargs)
        elif reducer := _REDUCERS.get(func):
            found = reducer(first, *args[1:], **kwargs)
        if found is not NotImplemented:
            return found
    args, kwargs = (looked_at if _only_looks(func, args, kwargs) else real)((args, kwargs))
    return func(*args, **kwargs)


def _only_looks(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation can do with values of the moment: it writes nothing, and no gradient is asked for."""
    if func in _LOOKS:
        return True
    needs = torch.is_grad_enabled() and any(d.requires_grad for d in deferred_in((args, kwargs)))
    name = getattr(func, "__name__", "")
    writes = (
        (name.endswith("_") and not name.endswith("__"))
        or name.startswith(("__i", "__set"))
        or "out" in kwargs
    )
    return not needs and not writes and name != "__get__"


# -- rows ----------------------------------------------------------------------------------------------------------


def _getitem(func: _Handler, x: DeferredLogits, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if not x.recipe.plain_rows or not all(_is_simple(item) for item in items):
        return NotImplemented
    missing = x.dim() - sum(_dims_taken(item) for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    at = next(place for place, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * max(0, missing)
    if missing < 0 or not isinstance(items[-1], slice) or items[-1] != slice(None):
        return NotImplemented  # some of the classes, or an error
    return _with_rows(func, x, (index,), {}, x.recipe.rows[tuple(items[:-1])])


def _is_simple(item: Any) -> bool:
    plain = item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int
    return plain or (isinstance(item, Tensor) and not isinstance(item, DeferredLogits))


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _with_rows(
    func: _Handler, x: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
) -> DeferredLogits:
    """The same with other rows, where the classes come last."""
    shape = (*rows.shape[:-1], x.recipe.shape[-1])
    return x.derive(func, args, kwargs, rows=rows, shape=shape, class_dim=len(shape) - 1)


def _reshape(func: _Handler, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    wanted = kwargs.get("shape", kwargs.get("size", args))
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list):
        wanted = wanted[0]
    if not x.recipe.plain_rows or not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    classes, count = x.recipe.shape[-1], math.prod(x.recipe.shape[:-1])
    *rows, last = wanted
    if last == -1 and (not count or math.prod(rows) != count):
        return NotImplemented
    if last not in (-1, classes):
        return NotImplemented
    if -1 in rows:
        known = -math.prod(rows)
        if rows.count(-1) > 1 or known <= 0 or count % known:
            return NotImplemented
        rows[rows.index(-1)] = count // known
    if math.prod(rows) != count:
        return NotImplemented
    return _with_rows(func, x, args, kwargs, x.recipe.rows.reshape(*rows, x.recipe.rows.shape[-1]))


def _flatten(func: _Handler, x: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not x.recipe.plain_rows or end_dim % x.dim() >= x.dim() - 1:
        return NotImplemented
    rows = x.recipe.rows.flatten(start_dim % x.dim(), end_dim % x.dim())
    return _with_rows(func, x, (start_dim, end_dim), {}, rows)


def _squeeze(func: _Handler, x: DeferredLogits, dim: int) -> Any:
    if not x.recipe.plain_rows or not isinstance(dim, int) or dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return _with_rows(func, x, (dim,), {}, x.recipe.rows.squeeze(dim % x.dim()))


def _unsqueeze(func: _Handler, x: DeferredLogits, dim: int) -> Any:
    if not x.recipe.plain_rows or dim % (x.dim() + 1) == x.dim():
        return NotImplemented
    return _with_rows(func, x, (dim,), {}, x.recipe.rows.unsqueeze(dim % (x.dim() + 1)))


def _transpose(func: _Handler, x: DeferredLogits, dim0: int, dim1: int) -> Any:
    order = list(range(x.dim()))
    a, b = dim0 % x.dim(), dim1 % x.dim()
    order[a], order[b] = order[b], order[a]
    return _ordered(func, x, (dim0, dim1), order)


def _permute(func: _Handler, x: DeferredLogits, *dims: Any, **kwargs: Any) -> Any:
    wanted = kwargs.get("dims", dims)
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list):
        wanted = wanted[0]
    return _ordered(func, x, (tuple(wanted),), [dim % x.dim() for dim in wanted])


def _turned(func: _Handler, x: DeferredLogits) -> Any:
    order = list(range(x.dim()))
    return _ordered(func, x, (), [*order[:-2], order[-1], order[-2]]) if x.dim() > 1 else NotImplemented


def _ordered(func: _Handler, x: DeferredLogits, args: tuple[Any, ...], order: list[int]) -> Any:
    if sorted(order) != list(range(x.dim())):
        return NotImplemented
    at = x.recipe.class_dim
    rows = [dim - (dim > at) for dim in order if dim != at]
    return x.derive(
        func,
        args,
        {},
        rows=x.recipe.rows.permute(*rows, len(rows)),
        shape=tuple(x.recipe.shape[dim] for dim in order),
        class_dim=order.index(at),
    )


# -- values --------------------------------------------------------------------------------------------------------


def _same(func: _Handler, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return x.derive(func, args, kwargs)


def _detach(func: _Handler, x: DeferredLogits, *args: Any) -> Any:
    return x.derive(func, args, {}, rows=x.recipe.rows.detach(), attached=False)


def _to(func: _Handler, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(item, Tensor) for item in (*args, *kwargs.values())):
        return NotImplemented
    known = {name: value for name, value in kwargs.items() if name in ("device", "dtype")}
    try:
        device, dtype, *_ = parse_to(*args, **known)
    except (RuntimeError, TypeError):
        return NotImplemented
    if device is not None and torch.empty(0, device=device).device != x.device:
        return NotImplemented
    return _cast(func, x, args, kwargs, x.dtype if dtype is None else dtype)


def _cast(func: _Handler, x: DeferredLogits, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point or x.recipe.normalised:
        return NotImplemented
    steps = x.recipe.steps if dtype == x.dtype else (*x.recipe.steps, ("to", dtype))
    return x.derive(func, args, kwargs, steps=steps, dtype=dtype)


def _caster(dtype: torch.dtype) -> _Handler:
    def handler(func: _Handler, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return _cast(func, x, args, kwargs, dtype)

    return handler


def _scaler(kind: str) -> _Handler:
    def handler(func: _Handler, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        number = type(args[0]) in (int, float) if args else kind == "tanh"
        if not number or kwargs or x.recipe.normalised:
            return NotImplemented
        step = (kind, args[0] if args else None)
        return x.derive(func, args, kwargs, steps=(*x.recipe.steps, step))

    return handler


def _log_softmax(func: _Handler, x: DeferredLogits, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype", args[-1] if args and isinstance(args[-1], torch.dtype) else None)
    if dim is None or dim % x.dim() != x.recipe.class_dim or x.recipe.normalised:
        return NotImplemented
    casting = Casting.now(x.device.type)
    steps = x.recipe.steps if dtype is None else (*x.recipe.steps, ("to", dtype))
    result = cross_entropy.loss_dtype(x.dtype, casting) if dtype is None else dtype
    return x.derive(func, (dim, *args), kwargs, steps=steps, normalised=True, dtype=result)


_HANDLERS: dict[Callable[..., Any], _Handler] = {
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeeze),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueeze),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes), _transpose),
    **dict.fromkeys((Tensor.permute, torch.permute), _permute),
    Tensor.mT.__get__: _turned,  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _same),
    **dict.fromkeys((Tensor.detach, torch.detach, Tensor.data.__get__), _detach),  # type: ignore[attr-defined]
    Tensor.to: _to,
    Tensor.float: _caster(torch.float32),
    Tensor.double: _caster(torch.float64),
    Tensor.half: _caster(torch.float16),
    Tensor.bfloat16: _caster(torch.bfloat16),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _scaler("mul")),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _scaler("div")),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _scaler("tanh")),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
}

_REDUCERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: cross_entropy.cross_entropy,
    F.nll_loss: cross_entropy.nll_loss,
    **dict.fromkeys((Tensor.gather, torch.gather), cross_entropy.gather),
    **dict.fromkeys((Tensor.argmax, torch.argmax), cross_entropy.argmax),
}

# What a tensor without values can tell.
_ATTRIBUTES = (
    "shape dtype device requires_grad ndim layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "itemsize nbytes"
)
_METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous get_device "
    "__len__ __hash__"
)
_KNOWN_BEFORE: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)

# What autograd knows of a tensor; the node of deferred logits while they are deferred.
_GRAPH: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "output_nr", "retains_grad")
)

# What needs values, but neither gradients nor the tensor itself.
_LOOKS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in ("__repr__", "tolist", "item", "argmax", "isnan", "isfinite", "isinf")
        ),
        *(torch.argmax, torch.isnan, torch.isfinite, torch.isinf),
    }
)
