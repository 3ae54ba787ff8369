"""Ops whose result's shape depends on data: a stated assumption takes the place of the data.

Where the argument has a shadow the true shape is known. Otherwise `Assume` says what is taken: the largest possible
result, or the one to be expected (expectations.py). A warning names the line, and what rests on the assumption
carries an error bar (NOTE [Error bars] in assume.py).

NOTE [Masks agree]
How many elements of a mask hold is assumed once. A small mask that nobody computed has a guessed shadow with that many
(shading.py); a large one is given that many when it is copied to the host. Whoever selects with it, on the card or on
the host, and whoever counts it, gets that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from vramfit.options.assume_choice import Assume
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.data_dependent.expectations import Expectation
from vramfit.virtual.data_dependent.plausible_values import evenly
from vramfit.virtual.data_dependent.shadow import MAX_KNOWN, may_carry
from vramfit.virtual.fake_impls.registry import finish, rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

# -- shared by the rules: how much is assumed, the warning of it, and that masks agree -----------------------


def true_result(mode: OpRunner, call: OpCall) -> Any:
    """What the op gives on shadows, None without them."""
    found = mode.shading.arguments(call.args, call.kwargs)
    if found is None or found[2]:
        return None
    return call.func(*found[0], **found[1])


def selected(mode: OpRunner, name: str, mask: torch.Tensor, elements: int) -> Extent:
    """How many elements a mask selects: all or the expected share, with a warning unless the number is exact.

    Args:
        elements: how many there are, where the mask is broadcast.
    """
    if not mask.numel():
        return Extent(0, 0, 0)
    times = elements // mask.numel()
    if (known := mode.shadows.count(mask)) is not None:
        return Extent(known * times, known * times, known * times)
    held, exact = mode.shading.masks.holding(mask)
    count = held * times
    if exact:
        return Extent(count, count, count)
    settled = mode.shading.masks.settle(mask)
    fewer = mode.guesses.fewer(count, settled=settled) // max(1, times) * times
    if fewer < count:
        mode.shading.masks.hold(mask, fewer // max(1, times))
    tell(mode, name, f"{fewer:,} of {elements:,} elements")
    return assumed(mode, fewer, 0, mode.shading.masks.most(mask) * times)


def assumed(mode: OpRunner, shown: int, low: int, high: int) -> Extent:
    """An assumed size, remembered as one that the program can read."""
    extent = Extent(shown, min(low, shown), max(high, shown))
    mode.meter.assuming = True
    mode.meter.numbers.assume(extent)
    mode.meter.assumed_sizes.add(shown)
    mode.guesses.rows.assume(shown, mode.guesses.location())
    return extent


def tell(mode: OpRunner, name: str, what: str) -> None:
    """Warn that a size is assumed.

    Args:
        name: what has that size.
        what: the sizes that are assumed.
    """
    kind = "an upper bound" if mode.machine.assume is Assume.UPPER else "what is to be expected"
    mode.machine.warn(
        "shape-from-data",
        f"the result of {name} has a shape that depends on data: {what} are assumed ({kind})",
        location=mode.guesses.location(),
    )


def like(mode: OpRunner, result: Any, device: torch.device) -> Any:
    """Fake tensors with the values of real ones."""
    if isinstance(result, torch.Tensor):
        return mode.wrap(result, device)
    return tuple(like(mode, r, device) for r in result)


def device_of(args: tuple[Any, ...]) -> torch.device:
    """The device of the first fake tensor."""
    for value in args:
        if type(value) is FakeTensor:
            return value.fake_device
    return torch.device("cpu")


def guess_positions(mode: OpRunner, mask: torch.Tensor, out: torch.Tensor) -> None:
    """Give small positions of what holds in a mask values, so that a loop over them visits different ones."""
    if not may_carry(out) or out.numel() == 0:
        return
    found = mode.shading.arguments((mask,), {})
    values = None if found is None else found[0][0].nonzero()
    if values is None or values.shape != out.shape:
        values = _spread_over(mask.shape, out)
    mode.shadows.set(out, values, guessed=True)


def number_rows(mode: OpRunner, rows: int, out: torch.Tensor) -> None:
    """Make a result the numbers of different rows, in their order, where it is small enough to have values."""
    mode.meter.expect(out, Expectation(values=max(1, rows)))
    if may_carry(out):
        mode.shadows.set(out, _spread_over((rows,), out), guessed=True)


def _spread_over(shape: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """As many coordinates as there are rows in ``out``, evenly spread over a shape."""
    flat = torch.linspace(0, max(0, prod(shape) - 1), out.shape[0], dtype=torch.float64).long()
    if not shape:
        return flat.reshape(out.shape)
    return torch.stack(torch.unravel_index(flat, tuple(shape)), -1).reshape(out.shape)


@rule("aten.nonzero.default")
def nonzero(mode: OpRunner, call: OpCall) -> Any:
    """Indices of the elements that are not zero."""
    tensor: torch.Tensor = call.args[0]
    if (true := true_result(mode, call)) is not None:
        return finish(mode, call, like(mode, true, device_of(call.args)))
    extent = selected(mode, "nonzero", tensor, tensor.numel())
    # CUDA returns the transpose of a (dim, n) tensor: aten/src/ATen/native/cuda/Nonzero.cu
    out = mode.fake_empty((tensor.dim(), extent.shown), torch.int64, tensor.device).t()
    finish(mode, call, out, extent)
    mode.meter.expect(out, Expectation(columns=tuple(tensor.shape)))
    guess_positions(mode, tensor, out)
    return out


@rule("aten.masked_select.default")
def masked_select(mode: OpRunner, call: OpCall) -> Any:
    """Elements where a mask holds."""
    return select_masked(mode, call, "masked_select")


def select_masked(mode: OpRunner, call: OpCall, name: str) -> Any:
    """Elements where a mask holds; ``name`` is the op that the program called."""
    if (true := true_result(mode, call)) is not None:
        return finish(mode, call, like(mode, true, device_of(call.args)))
    elements = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape).numel()
    mask = call.args[1] if type(call.args[1]) is FakeTensor else mode.wrap(call.args[1], call.args[0].device)
    extent = selected(mode, name, mask, elements)
    out = mode.fake_empty((extent.shown,), call.args[0].dtype, call.args[0].device)
    return finish(mode, call, out, extent)


def _positions(mode: OpRunner, indices: Any, device: torch.device) -> list[torch.Tensor | None]:
    """Indices with each mask replaced by the positions where it holds, one tensor for each of its dimensions."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        mask = index if type(index) is FakeTensor else mode.wrap(index, device)
        found = nonzero(mode, mode.call(torch.ops.aten.nonzero.default, mask))
        expanded.extend(torch.ops.aten.select.int(found, 1, axis) for axis in range(mask.dim()))
    return expanded


@rule("aten.index.Tensor", hands_on=True)
def index(mode: OpRunner, call: OpCall) -> Any:
    """``x[mask]``: boolean masks become index tensors first, as on the card (expandTensors in IndexingUtils.h)."""
    tensor, indices = call.args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return mode.run(call)
    return mode.run(call.with_arguments(tensor, _positions(mode, indices, tensor.device)))


@rule(*("aten.index_put_.default", "aten.index_put.default", "aten._index_put_impl_.default"), hands_on=True)
def index_put(mode: OpRunner, call: OpCall) -> Any:
    """``x[mask] = y``: a single number is a masked fill; otherwise the mask's positions are made first."""
    tensor, indices, *rest = call.args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return mode.run(call)
    if call.func is not torch.ops.aten.index_put.default:
        mask = _filled_by(call)
        if mask is not None:
            value = call.args[2].item()
            return mode.run(mode.call(_MASKED_FILL, tensor, mask, value))
    positions = _positions(mode, indices, tensor.device)  # they live until the kernel is done
    out = mode.fake_like(tensor) if call.func is torch.ops.aten.index_put.default else tensor
    return finish(mode, call.with_arguments(tensor, positions, *rest), out)


_MASKED_FILL = torch.ops.aten.masked_fill_.Scalar


def _filled_by(call: OpCall) -> torch.Tensor | None:
    """The mask of a write that is a masked fill (TensorAdvancedIndexing.cpp, ``canDispatchToMaskedFill``).

    It writes one number of the host where a single mask on the card says so.
    """
    tensor, indices, value = call.args[:3]
    accumulates = call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    if accumulates or value.numel() != 1 or type(value) is FakeTensor or value.device.type != "cpu":
        return None
    if len(given) != 1 or given[0].device != tensor.device:
        return None
    before = next(place for place, index in enumerate(indices) if index is not None)
    mask: torch.Tensor = given[0]
    for _ in range(tensor.dim() - before - mask.dim()):
        mask = torch.ops.aten.unsqueeze.default(mask, -1)
    return mask


@rule(
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten._unique.default",
    "aten.unique_dim_consecutive.default",
)
def unique(mode: OpRunner, call: OpCall) -> Any:
    """Distinct values, their inverse and their counts."""
    if (true := true_result(mode, call)) is not None:
        return finish(mode, call, like(mode, true, device_of(call.args)))
    tensor: torch.Tensor = call.args[0]
    bound = call.by_name()
    axis = bound.get("dim")
    elements = tensor.numel() if axis is None else tensor.shape[axis]
    extent = _distinct(mode, call.info.name, tensor, elements, whole=axis is not None)
    count = extent.shown
    inverse_shape = tuple(tensor.shape) if axis is None else (elements,)
    values_shape = (
        (count,)
        if axis is None
        else tuple(count if i == axis % tensor.dim() else n for i, n in enumerate(tensor.shape))
    )
    wants_inverse = bool(bound.get("return_inverse"))
    wants_counts = bool(bound.get("return_counts"))
    device = tensor.device
    out = (
        mode.fake_empty(values_shape, tensor.dtype, device),
        mode.fake_empty(inverse_shape if wants_inverse else (0,), torch.int64, device),
        mode.fake_empty((count,) if wants_counts else (0,), torch.int64, device),
    )[: len(call.func._schema.returns)]
    finish(mode, call, out, extent)
    if wants_counts and 0 < count <= MAX_KNOWN:  # programs split by them, so they sum to what is counted
        mode.shadows.set(out[2], evenly(elements, out[2]), guessed=True)
    if wants_inverse:
        mode.meter.expect(out[1], Expectation(values=max(1, count)))
    if wants_counts:
        mode.meter.expect(out[2], Expectation(share=1.0, total=elements))
    return out


def _distinct(mode: OpRunner, name: str, tensor: torch.Tensor, elements: int, *, whole: bool) -> Extent:
    """How many different values (or slices, ``whole``) there are among so many."""
    expected = mode.meter.expected(tensor)
    if expected.constant is not None and elements:
        return Extent(1, 1, 1)
    values = None if whole else expected.values
    most = min(elements, values) if values else elements
    if mode.machine.assume is Assume.UPPER:
        count = most
    elif values:  # draws with replacement
        count = round(values * (1 - (1 - 1 / values) ** elements))
    else:
        count = -(-elements // 2)
    tell(mode, name, f"{count:,} different ones among {elements:,}")
    return assumed(mode, count, min(1, elements), most)


@rule("aten.repeat_interleave.Tensor")
def repeat_interleave(mode: OpRunner, call: OpCall) -> Any:
    """``repeat_interleave(repeats)``: the sum of the repeats, given as ``output_size`` or read from the shadow."""
    size = call.kwargs.get("output_size")
    if size is None:
        size = _repeats(mode, call.args[0])
    return finish(mode, call, mode.fake_empty((size,), call.args[0].dtype, call.args[0].device))


def _repeats(mode: OpRunner, repeats: torch.Tensor) -> int:
    """What repeats sum to: known, or counts of something, else guessed."""
    if type(repeats) is not FakeTensor:
        return int(repeats.sum())
    known = mode.meter.expected(repeats)
    if known.total is not None:
        return known.total
    if known.constant is not None:
        return known.constant * repeats.numel()
    shadow, view = mode.shadows.find(repeats), mode.shadows.view(repeats)
    if shadow is not None and view is not None:
        size = int(view.sum())
        if shadow.guessed:
            _unbounded(mode, "repeat_interleave", f"{size:,} repeats")
        return size
    size = repeats.numel()
    _unbounded(mode, "repeat_interleave", f"{size:,} repeats, one each,")
    return size


def _unbounded(mode: OpRunner, name: str, what: str) -> None:
    tell(mode, name, what)
    mode.machine.warn(
        "size-without-bound",
        f"nothing bounds the result of {name}, whose shape depends on data: the error bar does not hold it",
        location=mode.guesses.location(),
    )


@rule("aten.bincount.default")
def bincount(mode: OpRunner, call: OpCall) -> Any:
    """Counts of small non-negative integers."""
    if (true := true_result(mode, call)) is not None:
        return finish(mode, call, like(mode, true, device_of(call.args)))
    minlength = call.kwargs.get("minlength", call.args[2] if len(call.args) > 2 else 0)
    expected = mode.meter.expected(call.args[0])
    if expected.constant is not None:
        bins = max(minlength, expected.constant + 1)
    elif expected.values:
        bins = max(minlength, expected.least + expected.values)
        if bins > minlength:
            tell(mode, "bincount", f"{bins:,} bins")
    else:
        bins = max(minlength, 1)
        if not minlength:
            _unbounded(mode, "bincount", f"{bins:,} bins")
    weights = call.kwargs.get("weights", call.args[1] if len(call.args) > 1 else None)
    dtype = (
        torch.int64 if weights is None else torch.float64 if weights.dtype != torch.float32 else torch.float32
    )
    return finish(mode, call, mode.fake_empty((bins,), dtype, call.args[0].device))


@rule("aten._pack_padded_sequence.default")
def pack_padded_sequence(mode: OpRunner, call: OpCall) -> Any:
    """The time steps that are not padding, and how many sequences each step has (a real CPU tensor)."""
    data, lengths, batch_first = call.args
    lengths = lengths if type(lengths) is not FakeTensor else mode.shadows.view(lengths)
    if lengths is None:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor")
    steps = data.shape[1] if batch_first else data.shape[0]
    sizes = [int((lengths > step).sum()) for step in range(min(steps, int(lengths.max())))]
    out = mode.fake_empty((int(lengths.sum()), *data.shape[2:]), data.dtype, data.device)
    finish(mode, call.with_arguments(data), out)
    return out, torch.tensor(sizes, dtype=torch.int64, device="cpu")


@rule("aten._pack_padded_sequence_backward.default")
def pack_padded_sequence_backward(mode: OpRunner, call: OpCall) -> Any:
    """A gradient of the padded shape."""
    grad, size = call.args[0], call.args[1]
    return finish(mode, call.with_arguments(grad), mode.fake_empty(tuple(size), grad.dtype, grad.device))


@rule("aten._to_dense.default")
def to_dense(mode: OpRunner, call: OpCall) -> Any:
    """A dense copy of a sparse tensor."""
    source: torch.Tensor = call.args[0]
    dtype = call.kwargs.get("dtype") or (call.args[1] if len(call.args) > 1 else None) or source.dtype
    return finish(mode, call, mode.fake_empty(tuple(source.shape), dtype, source.device))


@rule("aten._to_sparse.default", "aten._to_sparse.sparse_dim")
def to_sparse(mode: OpRunner, call: OpCall) -> Any:
    """A COO copy of a dense tensor: one column of indices per element that is not zero (TensorConversions.cpp,
    ``dense_to_sparse``); per row or block with one, where some dimensions stay dense."""
    source: torch.Tensor = call.args[0]
    layout = call.kwargs.get("layout") or torch.sparse_coo
    sparse_dims = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) else source.dim()
    if source.layout is not torch.strided or layout is not torch.sparse_coo:
        return mode.run(call)  # named as an op without a rule
    with mode:  # metered like ops of the program
        flags = source if sparse_dims == source.dim() else (source != 0).flatten(sparse_dims).any(-1)
    found = nonzero(mode, mode.call(torch.ops.aten.nonzero.default, flags))
    with mode:
        values = source[found.unbind(1)]
        indices = found.t().contiguous()
        return torch.sparse_coo_tensor(
            indices, values, source.shape, is_coalesced=True, check_invariants=False
        )


@rule("aten._use_cudnn_ctc_loss.default", "aten._use_cudnn_ctc_loss.Tensor")
def use_cudnn_ctc_loss(mode: OpRunner, call: OpCall) -> bool:
    """Whether cuDNN computes a CTC loss: aten/src/ATen/native/cudnn/LossCTC.cpp ``_use_cudnn_ctc_loss``."""
    log_probs, targets, _, target_lengths, blank = call.args
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
