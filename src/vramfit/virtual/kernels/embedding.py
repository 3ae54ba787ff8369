"""Embedding tables: their gradients sort the indices and sum the rows that share one.

aten/src/ATen/native/cuda/Embedding.cu (``embedding_dense_backward_cuda``), EmbeddingBackwardKernel.cu
(``embedding_backward_cuda_kernel``) and EmbeddingBag.cu. Up to 3072 indices are handled without sorting. torch sums
at once what has few long segments since 2.11.
"""

from __future__ import annotations

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import (
    scan_bytes,
    scan_error,
    select_bytes,
    sort_bytes,
    sort_error,
    unique_by_key_bytes,
)
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    around_outputs,
    before_outputs,
    ceil_div,
    round_up,
    table,
)
from vramfit.virtual.kernels.sorting import sort
from vramfit.virtual.op_call import KernelContext, OpCall

_UNSORTED = 3072
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_BLOCK = 1024  # MAX_BLOCK_SIZE
_BLOCKS_PER_SM = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM
_MAX = 2  # EmbeddingBagMode


@around_outputs
def _dense_backward(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)``.

    The gradient table is allocated after the indices are sorted, and before they are split into segments.
    """
    grad, indices = call.args[:2]
    weights = call.argument(2, "num_weights")
    by_frequency = bool(call.argument(4, "scale_grad_by_freq"))
    count, index = indices.numel(), indices.element_size()
    before.copy(indices)
    before.copy(grad)
    if count > _UNSORTED or (by_frequency and count):
        _sorted(before, count, index, call.context, counted=by_frequency)
        _segments(after, count, index, grad.shape[-1], weights, grad.element_size(), call.context)


def _sorted(scratch: Scratch, count: int, index: int, ctx: KernelContext, *, counted: bool) -> None:
    """Sorted indices, where they came from, and how often each occurs if that is wanted."""
    size = count * index
    scratch.take(size)
    scratch.take(size)
    positions = scratch.take(size)
    scratch.use(sort_bytes(count, index, index, ctx))
    scratch.doubt(sort_error(count, index, index, ctx))
    scratch.give(positions)
    if counted:
        scratch.take(size)
        for _ in range(2):  # two scans by key: descriptors of tiles, and a key of each
            storage = 2 * scan_bytes(count, index)
            scratch.use(storage)
            scratch.doubt(scan_error(storage))


def _segments(
    scratch: Scratch,
    count: int,
    index: int,
    width: int,
    weights: int,
    element: int,
    ctx: KernelContext,
    *,
    bags: bool = False,
) -> None:
    """Buffers of ``embedding_backward_cuda_kernel``: bounds of segments of equal indices, their partial sums."""
    segments = min(count, weights)
    partials = count // _ROWS_PER_THREAD + segments
    accumulator = max(4, element)
    scratch.take(count * index)  # where segments start
    scratch.take(8)
    # Unique keys, which nobody reads (ATen/cuda/cub.cuh, ``unique_by_key``).
    keys = scratch.take(count * index)
    scratch.use(unique_by_key_bytes(count, index, ctx))
    scratch.give(keys)
    scratch.take(segments * index)  # parts of each
    scratch.take(segments * index)  # their running sum
    scratch.use(scan_bytes(segments, index))
    scratch.take(8)
    scratch.take(partials * index)  # where parts start
    stride = round_up(width, 32)
    block = min(stride, _BLOCK)
    grid = ceil_div(segments * stride, block)
    few_and_long = grid < ctx.spec.sm_count * _BLOCKS_PER_SM and partials > grid * 4
    if few_and_long and not bags and not ctx.deterministic:  # atomic sums, in float32 for halves
        scratch.take(partials * index)
        scratch.take(weights * width * accumulator if accumulator != element else 0)
    else:
        scratch.take(partials * width * accumulator)


@before_outputs
def _renorm(call: OpCall, scratch: Scratch) -> None:
    """``embedding_renorm_`` (``max_norm``): sorted indices, which are unique among them (Embedding.cu)."""
    indices = call.args[1]
    count, index = indices.numel(), indices.element_size()
    if not count:
        return
    scratch.take(count * index)
    order = scratch.take(count * 8)
    sort(scratch, indices, -1, call.context)
    scratch.give(order)
    scratch.take(count * index)
    scratch.take(8)
    scratch.use(select_bytes(count, index))


@around_outputs
def _bag_backward(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``_embedding_bag_dense_backward``: sums and means sort, as above; the largest are added where they came from.

    EmbeddingBag.cu ``_embedding_bag_dense_backward_cuda``: an index array of the bags is sorted along. Repeated
    indices are counted when ``scale_grad_by_freq`` is set.
    """
    grad, indices = call.args[:2]
    weights = call.argument(5, "num_weights")
    by_frequency = bool(call.argument(6, "scale_grad_by_freq", False))
    mode = call.argument(7, "mode", 0)
    count, index = indices.numel(), indices.element_size()
    before.copy(grad)
    if mode != _MAX and count:
        _sorted(before, count, index, call.context, counted=by_frequency)
        _segments(after, count, index, grad.shape[-1], weights, grad.element_size(), call.context, bags=True)


RULES: dict[OpOverload, Rule] = table(
    {
        "embedding_dense_backward": _dense_backward,
        "embedding_renorm_": _renorm,
        "_embedding_bag_dense_backward": _bag_backward,
    }
)
