"""What operations do to deferred rows. See NOTE [Deferred rows] in `vramfit.inference.row_deferral`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from vramfit.errors import VramfitError
from vramfit.inference.row_deferral.deferred_rows import (
    DeferredRows,
    RowNode,
    RowProgram,
    RowsFacts,
    RowSlice,
    RowView,
    autocast_now,
    with_values,
)
from vramfit.torch_internals.dispatch import DisableTorchFunctionSubclass
from vramfit.torch_internals.pytree import tree_flatten, tree_unflatten

Func: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Named: TypeAlias = dict[str, Any]
NONE: frozenset[int] = frozenset()


def call_with_rows(func: Func, args: Args, kwargs: Named) -> Any:
    """Run an operation that has deferred rows among its arguments."""
    if func in _METADATA:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not args and isinstance(kwargs.get("input"), DeferredRows):
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    if func in _HANDLERS and not torch.is_grad_enabled() and "out" not in kwargs:
        args, kwargs = _settled(args, kwargs)
        if not any(isinstance(leaf, DeferredRows) for leaf in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        found = _HANDLERS[func](func, args, kwargs)
        if found is not NotImplemented:
            return found
    writes = _writes(func) and bool(args) and isinstance(args[0], DeferredRows)
    if writes:
        _check_unaliased(args[0])
    plain_args, plain_kwargs = with_values((args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    return args[0] if writes else result


def _settled(args: Args, kwargs: Named) -> tuple[Args, Named]:
    """Arguments with the values of what is used a second time, lest it be computed for every use.

    A recipe without a product, as that of a relative bias, may be: until a tensor of its own size is added, which it
    would keep alive.
    """
    leaves, spec = tree_flatten((args, kwargs))
    largest = max((leaf.numel() for leaf in leaves if type(leaf) is torch.Tensor), default=0)

    def settled(leaf: Any) -> Any:
        if not isinstance(leaf, DeferredRows):
            return leaf
        node = leaf.facts.node
        again = node.done and (node.product or 2 * largest >= math.prod(node.shape))
        return leaf.values() if again or leaf.facts.full is not None else leaf

    made: tuple[Args, Named] = tree_unflatten([settled(leaf) for leaf in leaves], spec)
    return made


def deferred(func: Func, args: Args, kwargs: Named, slice_bytes: int, lost: frozenset[int] = NONE) -> Any:
    """What an operation gives, deferred.

    Args:
        args, kwargs: with `RowNode` and `RowSlice` for what has the axes.
        lost: axes whose entries it mixes.

    Returns:
        a `DeferredRows`, several, or NotImplemented where it keeps none of the axes.
    """
    leaves = tree_flatten((args, kwargs))[0]
    parents = tuple(leaf for leaf in leaves if isinstance(leaf, RowNode))
    with_axes = [leaf for leaf in leaves if isinstance(leaf, RowNode | RowSlice | RowView)]
    of_parents = [set(one.dims) for one in parents] or [{axis for one in with_axes for axis in one.dims}]
    axes = set.intersection(*of_parents) - lost
    samples = {axis: _sampled(func, args, kwargs, axis) for axis in sorted(axes)}
    if not samples:
        return NotImplemented
    existing = [leaf.tensor if isinstance(leaf, RowSlice) else leaf for leaf in leaves]
    tensors = [one for one in existing if isinstance(one, torch.Tensor) and not one.is_inference()]
    versions = tuple((tensor, tensor._version) for tensor in tensors)
    extents = {axis: _extent(with_axes, axis) for axis in samples}

    def made(item: int | None) -> Any:
        parts = {axis: sample if item is None else sample[item] for axis, sample in samples.items()}
        # An axis that does not appear is one that the operation sums over.
        dims = {axis: part.shape.index(0) for axis, part in parts.items() if list(part.shape).count(0) == 1}
        if not dims or (parents and next(iter(parts.values())).device != parents[0].sample.device):
            return NotImplemented
        axis, dim = next(iter(dims.items()))
        shape = list(parts[axis].shape)
        shape[dim] = extents[axis]
        node = RowNode(
            func,
            args,
            kwargs,
            tuple(shape),
            dims,
            {axis: parts[axis] for axis in dims},
            item=item,
            autocast=autocast_now(parts[axis].device.type),
            versions=versions,
            parents=parents,
            product=func in _PRODUCTS or any(parent.product for parent in parents),
        )
        return DeferredRows.make(RowsFacts(node, slice_bytes, call_with_rows))

    first = next(iter(samples.values()))
    if isinstance(first, torch.Tensor):
        return made(None)
    several = [made(item) for item in range(len(first))]
    return NotImplemented if any(one is NotImplemented for one in several) else type(first)(several)


def _extent(leaves: Sequence[RowNode | RowSlice | RowView], axis: int) -> int:
    for leaf in leaves:
        if axis in leaf.dims:
            return leaf.shape[leaf.dims[axis]]
    raise LookupError(axis)


def _sampled(func: Func, args: Args, kwargs: Named, axis: int) -> Any:
    """The result with nothing along an axis."""

    def none(leaf: Any) -> Any:
        if isinstance(leaf, RowNode):
            return leaf.samples[axis]
        return leaf.empty(axis) if isinstance(leaf, RowSlice | RowView) else leaf

    leaves, spec = tree_flatten((args, kwargs))
    plain_args, plain_kwargs = tree_unflatten([none(leaf) for leaf in leaves], spec)
    return func(*plain_args, **plain_kwargs)


def _encoded(args: Args, kwargs: Named) -> tuple[Args, Named] | None:
    """Arguments with nodes, views and slices; None where entries do not meet under broadcasting, or values exist.

    Axes are those of the argument that has most of them.
    """
    leaves, spec = tree_flatten((args, kwargs))
    known = [leaf.facts for leaf in leaves if isinstance(leaf, DeferredRows)]
    if any(facts.full is not None for facts in known):
        return None
    places = _places(max((facts.node for facts in known), key=lambda node: len(node.dims)))

    def encoded(leaf: Any) -> Any:
        if isinstance(leaf, DeferredRows):
            own = _places(leaf.facts.node)
            return leaf.facts.node if own == places else _view(leaf.facts.node, own, places)
        return _sliced(leaf, places) if isinstance(leaf, torch.Tensor) else leaf

    made: tuple[Args, Named] = tree_unflatten([encoded(leaf) for leaf in leaves], spec)
    return made


def _places(node: RowNode) -> dict[int, tuple[int, int]]:
    """For each axis, its dimension counted from the right, and its size."""
    return {axis: (len(node.shape) - dim, node.shape[dim]) for axis, dim in node.dims.items()}


def _view(node: RowNode, own: dict[int, tuple[int, int]], places: dict[int, tuple[int, int]]) -> RowView:
    """A recipe's result by the axes of another, which broadcasts with it."""
    inner = {place: axis for axis, place in own.items()}
    axes = {axis: inner[place] for axis, place in places.items() if place in inner}
    dims = {
        axis: len(node.shape) - from_right
        for axis, (from_right, size) in places.items()
        if len(node.shape) >= from_right and node.shape[-from_right] == size
    }
    return RowView(node, axes, dims)


def _sliced(tensor: torch.Tensor, places: dict[int, tuple[int, int]]) -> torch.Tensor | RowSlice:
    """A tensor that broadcasts to deferred ones, cut along the axes that it has.

    Args:
        places: for each axis, its dimension counted from the right, and its size.
    """
    dims = {
        axis: tensor.dim() - from_right
        for axis, (from_right, size) in places.items()
        if tensor.dim() >= from_right and tensor.shape[-from_right] == size
    }
    return RowSlice(tensor, dims) if dims else tensor


def _of_first(args: Args, kwargs: Named) -> tuple[Args, Named] | None:
    """Arguments of an operation of which only the first one has rows."""
    leaves = tree_flatten((args[1:], kwargs))[0]
    if args[0].facts.full is not None or any(isinstance(leaf, DeferredRows) for leaf in leaves):
        return None
    return (args[0].facts.node, *args[1:]), kwargs


# -- operations that treat each row by itself ----------------------------------------------------------------------


def _pointwise(func: Func, args: Args, kwargs: Named) -> Any:
    """Value by value, with broadcasting."""
    encoded = _encoded(args, kwargs)
    if encoded is None:
        return NotImplemented
    return deferred(func, *encoded, _slice_bytes(args, kwargs))


def _in_place(func: Func, args: Args, kwargs: Named) -> Any:
    """The same, with the result in place of the first argument."""
    target = args[0]
    encoded = _encoded(args, kwargs)
    if not isinstance(target, DeferredRows) or encoded is None:
        return NotImplemented
    _check_unaliased(target)
    found = deferred(_OUT_OF_PLACE[func], *encoded, target.facts.slice_bytes)
    if found is NotImplemented or found.shape != target.shape or found.dtype != target.dtype:
        return NotImplemented
    target.facts.node = found.facts.node
    return target


def _along_dim(func: Func, args: Args, kwargs: Named) -> Any:
    """Along some dimensions: softmax, sums, maxima, parts. Axes among them are lost."""
    if not args or not isinstance(args[0], DeferredRows):
        return NotImplemented
    given = kwargs.get("dim", args[_DIM_AT.get(func, 1)] if len(args) > _DIM_AT.get(func, 1) else None)
    dims = [given] if isinstance(given, int) else given
    if not isinstance(dims, list | tuple) or not dims or not all(isinstance(dim, int) for dim in dims):
        return NotImplemented
    numbers = {dim % args[0].dim() for dim in dims}
    lost = frozenset(axis for axis, dim in args[0].facts.node.dims.items() if dim in numbers)
    return _only_first(func, args, kwargs, lost)


def _only_first(func: Func, args: Args, kwargs: Named, lost: frozenset[int] = NONE) -> Any:
    if not args or not isinstance(args[0], DeferredRows):
        return NotImplemented
    encoded = _of_first(args, kwargs)
    if encoded is None:
        return NotImplemented
    return deferred(func, *encoded, args[0].facts.slice_bytes, lost)


def _normalised(func: Func, args: Args, kwargs: Named) -> Any:
    """Layer norms over the last dimensions."""
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape")
    if not isinstance(args[0], DeferredRows) or not isinstance(shape, Sequence):
        return NotImplemented
    first = args[0].dim() - len(shape)
    lost = frozenset(axis for axis, dim in args[0].facts.node.dims.items() if dim >= first)
    return _only_first(func, args, kwargs, lost)


def _dropped(func: Func, args: Args, kwargs: Named) -> Any:
    """Dropout that drops nothing; any other draws for the whole at once."""
    training = kwargs.get("training", args[2] if len(args) > 2 else func is F.dropout)
    chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return args[0] if not training or chance == 0 else NotImplemented


def _viewed(func: Func, args: Args, kwargs: Named) -> Any:
    """Another order of the dimensions."""
    found = _along_dim(func, args, kwargs) if func in _SQUEEZES else _only_first(func, args, kwargs)
    if found is not NotImplemented:
        args[0].facts.aliased = found.facts.aliased = True
    return found


def _indexed(_func: Func, args: Args, kwargs: Named) -> Any:
    """Slices that take everything: the tensor itself. Any other selection gets the whole."""
    rows, index = args
    if not isinstance(rows, DeferredRows) or rows.facts.full is not None or kwargs:
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > rows.dim() or not all(isinstance(item, slice) for item in items):
        return NotImplemented
    whole = all(range(size)[item] == range(size) for item, size in zip(items, rows.shape, strict=False))
    if not whole:
        return NotImplemented
    rows.facts.aliased = True
    return rows


def _reshaped(_func: Func, args: Args, kwargs: Named) -> Any:
    """Another shape in which the rows are a dimension of their own, too."""
    rows = args[0]
    sizes: Any = kwargs.get("shape", kwargs.get("size", args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    if not isinstance(rows, DeferredRows) or not all(type(size) is int for size in sizes):
        return NotImplemented
    if rows.facts.full is not None:
        return NotImplemented
    shape, total = list(sizes), math.prod(rows.shape)
    if -1 in shape:
        known = -math.prod(shape)
        if known <= 0 or total % known:
            return NotImplemented
        shape[shape.index(-1)] = total // known
    node = rows.facts.node
    if math.prod(shape) != total:
        return NotImplemented
    dims = {axis: _place(node.shape, dim, shape) for axis, dim in node.dims.items()}
    lost = frozenset(axis for axis, dim in dims.items() if dim is None)
    kept = {axis: dim for axis, dim in dims.items() if dim is not None}
    found = deferred(_Reshape(tuple(shape), node, kept), (node,), {}, rows.facts.slice_bytes, lost)
    if found is not NotImplemented:
        rows.facts.aliased = found.facts.aliased = True
    return found


def _place(before: Sequence[int], dim: int, after: Sequence[int]) -> int | None:
    """Where a dimension is after a reshape; None where it is none of its own there."""
    for place, size in enumerate(after):
        if size == before[dim] and math.prod(after[:place]) == math.prod(before[:dim]):
            return place
    return None


class _Reshape:
    """Reshapes a block: to the shape of the whole, but for the axes."""

    def __init__(self, shape: tuple[int, ...], node: RowNode, kept: dict[int, int]) -> None:
        self.shape, self.kept = shape, {place: node.dims[axis] for axis, place in kept.items()}

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        sizes = (
            block.shape[self.kept[place]] if place in self.kept else size
            for place, size in enumerate(self.shape)
        )
        return block.reshape(tuple(sizes))


# -- products that take rows and give little of each ---------------------------------------------------------------


def _product(func: Func, args: Args, kwargs: Named) -> Any:
    """Rows times a matrix that exists, computed block by block into an output that is allocated once."""
    if len(args) < 2 or not isinstance(args[0], DeferredRows) or args[0].facts.full is not None:
        return NotImplemented
    rows, other = args[0], args[1]
    node, slice_bytes = rows.facts.node, rows.facts.slice_bytes
    if isinstance(other, DeferredRows) or not isinstance(other, torch.Tensor):
        return NotImplemented
    linear = func is F.linear
    if not linear and other.dim() < 2:
        return NotImplemented
    lost = frozenset(axis for axis, dim in node.dims.items() if dim == rows.dim() - 1)
    if not linear:
        # Leading dimensions are those of several products; the last two of the matrix are none of the axes.
        leading = {axis: rows.dim() - dim for axis, dim in node.dims.items() if dim < rows.dim() - 2}
        other = _sliced(mergeable(other), {axis: (at, rows.shape[-at]) for axis, at in leading.items()})
    last = deferred(func, (node, other, *args[2:]), kwargs, slice_bytes, lost)
    if last is NotImplemented:
        return NotImplemented
    program, out = RowProgram(last.facts.node), None
    for spans in program.blocks(slice_bytes):
        block = program.block(spans)
        if out is None:
            if tuple(block.shape) == last.facts.node.shape:
                program.finish()
                return block
            out = torch.empty(last.facts.node.shape, dtype=block.dtype, device=block.device)
        RowSlice(out, last.facts.node.dims).block(spans).copy_(block)
        del block
    program.finish()
    return out


def mergeable(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices whose leading dimensions a batched product can merge without a copy, which each slice would make anew.

    ``torch.matmul`` reshapes to three dimensions (aten/src/ATen/native/LinearAlgebra.cpp, ``_matmul_impl``).
    """
    if matrices.dim() <= 3:
        return matrices
    merged = matrices.reshape(-1, *matrices.shape[-2:])
    return merged.view(matrices.shape)


# -- writing in place ----------------------------------------------------------------------------------------------


def _writes(func: Func) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))


def _check_unaliased(rows: DeferredRows) -> None:
    """Refuse to write where another tensor would have to change along.

    Raises:
        VramfitError: one is a view of the other.
    """
    if rows.facts.aliased:
        raise VramfitError(
            "the model writes into attention scores of which it has a view, which deferred rows cannot follow",
            "Leave attention-chunking out for this model",
        )


def _slice_bytes(args: Args, kwargs: Named) -> int:
    leaves = tree_flatten((args, kwargs))[0]
    return next(leaf.facts.slice_bytes for leaf in leaves if isinstance(leaf, DeferredRows))


# -- the tables ----------------------------------------------------------------------------------------------------


def _named(places: Sequence[Any], names: str) -> list[Func]:
    """The functions of those names, where a place has one."""
    return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]


_T = torch.Tensor
_POINTWISE = _named(
    (torch, _T, F),
    "add sub mul div true_divide neg abs exp log sqrt rsqrt square pow tanh sigmoid relu relu6 gelu silu mish elu "
    "selu celu leaky_relu hardtanh hardswish softplus erf sin cos clamp clamp_min clamp_max maximum minimum where "
    "masked_fill eq ne lt le gt ge logical_and logical_or logical_not nan_to_num reciprocal rsub subtract multiply "
    "divide to type_as float half bfloat16 double bool clone detach lerp addcmul",
) + _named(
    (_T,),
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ __rpow__ __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__",
)
_ALONG = _named(
    (torch, _T, F),
    "softmax log_softmax sum mean amax amin logsumexp max min cumsum unbind chunk split std var norm",
)
_DIM_AT: dict[Func, int] = dict.fromkeys(
    _named((torch, _T), "chunk split norm"), 2
)  # after the number of parts, or their size
_SQUEEZES = frozenset(_named((torch, _T), "squeeze"))
_VIEWS = _named((torch, _T), "transpose permute unsqueeze squeeze movedim swapaxes contiguous")
_PAIRS = [
    (getattr(_T, f"{name}_"), getattr(_T, name))
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "masked_fill",
        "clamp",
        "tanh",
        "exp",
        "relu",
        "sigmoid",
        "clamp_min",
        "clamp_max",
    ]
]
_PAIRS += [
    (_T.__iadd__, _T.add),
    (_T.__isub__, _T.sub),
    (_T.__imul__, _T.mul),
    (_T.__itruediv__, _T.div),
]
_OUT_OF_PLACE: dict[Func, Func] = dict(_PAIRS)
_METADATA = frozenset(
    [
        *_named(
            (_T,), "size dim ndimension numel nelement is_floating_point is_complex element_size __len__"
        ),
        *_named((torch,), "is_tensor is_floating_point is_complex numel"),
        *(
            getattr(_T, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu")
        ),
        *(getattr(_T, name).__get__ for name in ("is_sparse", "is_mps", "is_leaf", "grad_fn", "is_nested")),
    ]
)
_PRODUCTS = frozenset(_named((torch, _T, F), "matmul bmm linear __matmul__"))
_HANDLERS: dict[Func, Callable[[Func, Args, Named], Any]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_ALONG, _along_dim),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_OUT_OF_PLACE, _in_place),
    **dict.fromkeys(_named((torch, _T, F), "layer_norm rms_norm"), _normalised),
    **dict.fromkeys(_named((torch, F), "dropout"), _dropped),
    **dict.fromkeys(_named((_T, torch), "view reshape"), _reshaped),
    _T.__getitem__: _indexed,
    **dict.fromkeys(_PRODUCTS, _product),
}
