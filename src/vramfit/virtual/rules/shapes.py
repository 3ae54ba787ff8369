"""Ops whose result's shape depends on data: a stated assumption takes the place of the data.

Where the argument has a shadow the true shape is known. Otherwise the largest possible result is assumed (every
element selected, every value distinct), with a warning that names the line: the memory is then an upper bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.rules.registry import rule

if TYPE_CHECKING:
    from vramfit.virtual.mode import VirtualMode


def _finish(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    mode.settle(func, mode.ops[func], args, kwargs, out)
    return out


def _true_result(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op gives on shadows, None without them."""
    found = mode.shading.arguments(args, kwargs)
    if found is None or found[2]:
        return None
    return func(*found[0], **found[1])


def _assume(mode: VirtualMode, name: str, what: str) -> None:
    mode.machine.warn(
        "shape-from-data",
        f"the result of {name} has a shape that depends on data: {what} is assumed (an upper bound)",
        location=mode.guesses.location(),
    )


def _like(mode: VirtualMode, result: Any, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor):
        return mode.wrap(result, device)
    return tuple(_like(mode, r, device) for r in result)


def _device(args: tuple[Any, ...]) -> torch.device:
    for value in args:
        if type(value) is FakeTensor:
            return value.fake_device
    return torch.device("cpu")


@rule("aten.nonzero.default")
def nonzero(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices of the elements that are not zero."""
    tensor: torch.Tensor = args[0]
    if (true := _true_result(mode, func, args, kwargs)) is not None:
        return _finish(mode, func, args, kwargs, _like(mode, true, _device(args)))
    _assume(mode, "nonzero", "every element")
    # CUDA returns the transpose of a (dim, n) tensor: aten/src/ATen/native/cuda/Nonzero.cu
    out = mode.fake_empty((tensor.dim(), tensor.numel()), torch.int64, tensor.device).t()
    return _finish(mode, func, args, kwargs, out)


@rule("aten.masked_select.default")
def masked_select(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements where a mask holds."""
    if (true := _true_result(mode, func, args, kwargs)) is not None:
        return _finish(mode, func, args, kwargs, _like(mode, true, _device(args)))
    _assume(mode, "masked_select", "every element")
    count = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return _finish(mode, func, args, kwargs, mode.fake_empty((count,), args[0].dtype, args[0].device))


def _positions(mode: VirtualMode, indices: Any, device: torch.device) -> list[torch.Tensor | None]:
    """Indices with each mask replaced by the positions where it holds, one tensor for each of its dimensions."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        mask = index if type(index) is FakeTensor else mode.wrap(index, device)
        found = nonzero(mode, torch.ops.aten.nonzero.default, (mask,), {})
        expanded.extend(torch.ops.aten.select.int(found, 1, axis) for axis in range(mask.dim()))
    return expanded


@rule("aten.index.Tensor")
def index(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask]``: boolean masks become index tensors first, as on the card (expandTensors in IndexingUtils.h)."""
    tensor, indices = args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return mode.run(func, mode.ops[func], args, kwargs)
    return mode.run(func, mode.ops[func], (tensor, _positions(mode, indices, tensor.device)), kwargs)


@rule("aten.index_put_.default", "aten.index_put.default", "aten._index_put_impl_.default")
def index_put(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = y``: a boolean mask with one value is a masked fill; otherwise its indices are made first."""
    tensor, indices, *rest = args
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return mode.run(func, mode.ops[func], args, kwargs)
    _positions(mode, indices, tensor.device)
    del rest
    if func is torch.ops.aten.index_put.default:
        out = mode.fake_like(tensor)
        return _finish(mode, func, args, kwargs, out)
    mode.settle(func, mode.ops[func], args, kwargs, tensor)
    return tensor


@rule(
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten._unique.default",
    "aten.unique_dim_consecutive.default",
)
def unique(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Distinct values, their inverse and their counts."""
    if (true := _true_result(mode, func, args, kwargs)) is not None:
        return _finish(mode, func, args, kwargs, _like(mode, true, _device(args)))
    _assume(mode, mode.ops[func].name, "every value distinct")
    tensor: torch.Tensor = args[0]
    bound = {a.name: a.default_value for a in func._schema.arguments[1:]}
    bound |= dict(zip([a.name for a in func._schema.arguments[1:]], args[1:], strict=False)) | kwargs
    axis = bound.get("dim")
    count = tensor.numel() if axis is None else tensor.shape[axis]
    inverse_shape = tuple(tensor.shape) if axis is None else (count,)
    values_shape = (count,) if axis is None else tuple(tensor.shape)
    wants_inverse = bool(bound.get("return_inverse"))
    wants_counts = bool(bound.get("return_counts"))
    device = tensor.device
    out = (
        mode.fake_empty(values_shape, tensor.dtype, device),
        mode.fake_empty(inverse_shape if wants_inverse else (0,), torch.int64, device),
        mode.fake_empty((count,) if wants_counts else (0,), torch.int64, device),
    )[: len(func._schema.returns)]
    return _finish(mode, func, args, kwargs, out)


@rule("aten.repeat_interleave.Tensor")
def repeat_interleave(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``repeat_interleave(repeats)``: the sum of the repeats, given as ``output_size`` or read from the shadow."""
    size = kwargs.get("output_size")
    if size is None:
        view = mode.shadows.view(args[0]) if type(args[0]) is FakeTensor else args[0]
        if view is not None:
            size = int(view.sum())
        else:
            _assume(mode, "repeat_interleave", "one repeat each")
            size = args[0].numel()
    return _finish(mode, func, args, kwargs, mode.fake_empty((size,), args[0].dtype, args[0].device))


@rule("aten.bincount.default")
def bincount(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts of small non-negative integers."""
    if (true := _true_result(mode, func, args, kwargs)) is not None:
        return _finish(mode, func, args, kwargs, _like(mode, true, _device(args)))
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    _assume(mode, "bincount", f"{max(minlength, 1)} bins")
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    dtype = (
        torch.int64 if weights is None else torch.float64 if weights.dtype != torch.float32 else torch.float32
    )
    return _finish(mode, func, args, kwargs, mode.fake_empty((max(minlength, 1),), dtype, args[0].device))


@rule("aten._pack_padded_sequence.default")
def pack_padded_sequence(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The time steps that are not padding, and how many sequences each step has (a real CPU tensor)."""
    data, lengths, batch_first = args
    lengths = lengths if type(lengths) is not FakeTensor else mode.shadows.view(lengths)
    if lengths is None:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor")
    steps = data.shape[1] if batch_first else data.shape[0]
    sizes = [int((lengths > step).sum()) for step in range(min(steps, int(lengths.max())))]
    out = mode.fake_empty((int(lengths.sum()), *data.shape[2:]), data.dtype, data.device)
    _finish(mode, func, (data,), kwargs, out)
    return out, torch.tensor(sizes, dtype=torch.int64)


@rule("aten._pack_padded_sequence_backward.default")
def pack_padded_sequence_backward(
    mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A gradient of the padded shape."""
    grad, size = args[0], args[1]
    return _finish(mode, func, (grad,), kwargs, mode.fake_empty(tuple(size), grad.dtype, grad.device))


@rule("aten._to_dense.default")
def to_dense(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A dense copy of a sparse tensor."""
    source: torch.Tensor = args[0]
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or source.dtype
    return _finish(mode, func, args, kwargs, mode.fake_empty(tuple(source.shape), dtype, source.device))


@rule("aten._to_sparse.default")
def to_sparse(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A COO copy of a dense tensor: one column of indices per element that is not zero (dense_to_sparse)."""
    source: torch.Tensor = args[0]
    layout = kwargs.get("layout") or torch.sparse_coo
    if source.layout is not torch.strided or layout is not torch.sparse_coo or len(args) > 1:
        return mode.run(func, mode.ops[func], args, kwargs)  # named as an op without a rule
    found = nonzero(mode, torch.ops.aten.nonzero.default, (source,), {})
    with mode:  # what follows is metered like ops of the program
        values = source[found.unbind(1)]
        indices = found.t().contiguous()
        return torch.sparse_coo_tensor(
            indices, values, source.shape, is_coalesced=True, check_invariants=False
        )


@rule("aten._use_cudnn_ctc_loss.default", "aten._use_cudnn_ctc_loss.Tensor")
def use_cudnn_ctc_loss(mode: VirtualMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether cuDNN computes a CTC loss: aten/src/ATen/native/cudnn/LossCTC.cpp ``_use_cudnn_ctc_loss``."""
    del func, kwargs
    log_probs, targets, _, target_lengths, blank = args
    lengths = target_lengths.tolist() if isinstance(target_lengths, torch.Tensor) else list(target_lengths)
    return bool(
        mode.workspaces.context(log_probs.device.index or 0).cudnn_enabled
        and blank == 0
        and targets.dim() == 1
        and log_probs.dtype is torch.float32
        and targets.dtype is torch.int32
        and targets.device.type == "cpu"
        and max(lengths, default=0) <= 256
    )
