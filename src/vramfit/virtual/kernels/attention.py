"""Attention kernels: split-key accumulators forward, and what their backward passes accumulate into.

Flash: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_varlen_fwd``,
``set_params_splitkv``, ``mha_bwd``, ``mha_varlen_bwd``). Memory-efficient: .../cuda/attention.cu,
.../cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h with the kernel list of kernels/cutlassB.h.
cuDNN's are in `cudnn_attention`.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cudnn_attention import cudnn_backward, cudnn_forward
from vramfit.virtual.kernels.rules import Rule, ceil_div, given_back, nbytes, round_up, table
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_FLOAT = 4


def _extras(before: list[int], after: list[int]) -> Extras | None:
    first, last = tuple(size for size in before if size), tuple(size for size in after if size)
    return Extras(first, last) if first or last else None


def _copy_unless(contiguous: bool, tensor: torch.Tensor) -> int:
    return 0 if contiguous else nbytes(tensor)


# -- flash ---------------------------------------------------------------------------------------------------


def flash_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """Into how many parts flash attention splits the keys to fill the card (``num_splits_heuristic``).

    Args:
        blocks: batch x heads x blocks of 64 queries.
        multiprocessors: twice the SM count, as ``set_params_splitkv`` passes it.
        key_blocks: blocks of keys.
    """
    if blocks >= 0.8 * multiprocessors:
        return 1
    most = min(128, multiprocessors, key_blocks)
    efficiency: list[float] = []
    for splits in range(1, most + 1):
        if splits > 1 and ceil_div(key_blocks, splits) == ceil_div(key_blocks, splits - 1):
            efficiency.append(-1.0)  # gives the same blocks per split as one split fewer
            continue
        waves = blocks * splits / multiprocessors
        efficiency.append(waves / -(-blocks * splits // multiprocessors))
    best = max(efficiency, default=0.0)
    for splits, value in enumerate(efficiency, start=1):
        if value >= 0.85 * best:
            return splits
    return 1


_RANDOM_STATE = 16
"""Bytes of a second random state, which every pass over dense sequences that an H100 was recorded with makes and drops.
Passes over packed sequences were not recorded."""


def _flash_head(size: int) -> int:
    return round_up(size, 32 if size <= 128 else 64)


def _flash_forward(
    batch: int,
    heads: int,
    key_heads: int,
    length: int,
    keys: int,
    size: int,
    dropout: float,
    ctx: KernelContext,
    *,
    windowed: bool = False,
    splits: int = 0,
) -> Extras | None:
    if not batch:
        return None
    if dropout > 0:
        return _extras([], [_RANDOM_STATE])  # split-key kernels know no dropout
    if length == 1 and heads > key_heads and not windowed:
        length, heads = heads // key_heads, key_heads  # heads that share a key head become queries of it
    if splits < 1:
        key_blocks = ceil_div(keys, 256 if size <= 64 else 128 if size <= 128 else 64)
        splits = flash_splits(batch * heads * ceil_div(length, 64), 2 * ctx.spec.sm_count, key_blocks)
    if splits == 1:
        return _extras([], [_RANDOM_STATE])
    rows = splits * batch * heads * length
    return _extras([], [rows * _FLOAT, rows * _flash_head(size) * _FLOAT, _RANDOM_STATE])


def _sdp_flash_forward(call: OpCall) -> Extras | None:
    batch, heads, length, size = call.args[0].shape
    _, key_heads, keys, _ = call.args[1].shape
    dropout = call.argument(3, "dropout_p", 0.0)
    return _flash_forward(batch, heads, key_heads, length, keys, size, dropout, call.context)


def _plain_flash_forward(call: OpCall) -> Extras | None:
    """``_flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, ...)``."""
    query, key, dropout = call.args[0], call.args[1], call.args[7]
    windows = (call.argument(11 + i, f"window_size_{side}") for i, side in enumerate(("left", "right")))
    windowed = any(window is not None and window >= 0 for window in windows)
    windowed |= call.argument(14, "alibi_slopes") is not None
    heads, size = query.shape[-2:]
    key_heads = key.shape[-2]
    if call.args[3] is None:
        batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
    else:  # packed sequences: split only where single queries have their heads grouped
        batch, length, keys = call.args[3].numel() - 1, call.args[5], call.args[6]
        if length != 1 or heads == key_heads or windowed:
            return None
    splits = call.argument(16, "num_splits") or 0
    return _flash_forward(
        *(batch, heads, key_heads, length, keys, size, dropout, call.context),
        windowed=windowed,
        splits=splits,
    )


def _flash_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    contiguous: tuple[bool, bool],
    shape: tuple[int, int, int, int, int],
    rows: int,
    element: int,
    ctx: KernelContext,
) -> Extras | None:
    """``mha_bwd``: fp32 row sums and dQ, whole-head dK and dV where heads share keys.

    Args:
        contiguous: whether each of the two is, as (batch, length, heads, size).
        shape: batch, heads, key heads, total keys, head size.
        rows: padded queries over the whole batch.
        element: bytes of an element of the inputs.
    """
    batch, heads, key_heads, total_keys, size = shape
    accumulator = rows * heads * _flash_head(size) * _FLOAT
    if ctx.deterministic:  # one accumulator for each group of blocks
        accumulator *= ceil_div(ctx.spec.sm_count, batch * heads)
    expanded = total_keys * heads * size * element if key_heads != heads else 0
    return _extras(
        [_copy_unless(contiguous[0], grad), _copy_unless(contiguous[1], out)],
        [rows * heads * _FLOAT, accumulator, expanded, expanded],
    )


def _sdp_flash_backward(call: OpCall) -> Extras | None:
    grad, query, key, _, out = call.args[:5]
    batch, heads, length, size = query.shape
    if not batch:
        return None
    contiguous = grad.transpose(1, 2).is_contiguous(), out.transpose(1, 2).is_contiguous()
    shape = (batch, heads, key.shape[1], batch * key.shape[2], size)
    return _flash_backward(
        grad, out, contiguous, shape, batch * round_up(length, 128), query.element_size(), call.context
    )


def _plain_flash_backward(call: OpCall) -> Extras | None:
    grad, query, key, _, out = call.args[:5]
    heads, size = query.shape[-2:]
    if call.args[6] is not None:  # varlen (mha_varlen_bwd): 128 rows of padding for every sequence
        batch = call.args[6].numel() - 1
        rows, keys = query.shape[0] + 128 * batch, key.shape[0]
    else:
        batch = query.shape[0]
        rows, keys = batch * round_up(query.shape[1], 128), batch * key.shape[1]
    if not batch:
        return None
    contiguous = grad.is_contiguous(), out.is_contiguous()
    shape = (batch, heads, key.shape[-2], keys, size)
    return _flash_backward(grad, out, contiguous, shape, rows, query.element_size(), call.context)


# -- memory-efficient ----------------------------------------------------------------------------------------


def _efficient_forward(out: torch.Tensor, query_size: int) -> Extras | None:
    """fp32 output accumulator when a head is wider than the 128 columns that registers hold
    (kernel_forward.h)."""
    if out.element_size() == _FLOAT or max(query_size, out.shape[-1]) <= 128:
        return None
    return _extras([], [out.numel() * _FLOAT])


_MOST_BATCHES = (1 << 16) - 1  # of one launch


def _is_chunked(batch: int, ctx: KernelContext) -> bool:
    """Whether a batch is computed in chunks: since 2.15 a kernel is launched again with an offset (``batch_offset``
    of mem_eff_attention/kernel_forward.h and kernel_backward.h)."""
    return batch > _MOST_BATCHES and ctx.torch_version < (2, 15)


def _efficient_forward_rule(call: OpCall) -> Extras | None:
    """``_scaled_dot_product_efficient_attention_cuda``: the first chunk's results come before those of the whole."""
    batch = call.args[0].shape[0]
    if not _is_chunked(batch, call.context):
        return _efficient_forward(call.out[0], call.args[0].shape[-1])
    parts = [nbytes(result) // batch * _MOST_BATCHES for result in call.out[:2]]
    accumulator = _efficient_forward(call.out[0][:_MOST_BATCHES], call.args[0].shape[-1])
    return _extras(parts, list(accumulator.after) if accumulator is not None else [])


def _plain_efficient_forward(call: OpCall) -> Extras | None:
    return _efficient_forward(call.out[0], call.args[0].shape[-1])


# Backward kernels in the order in which they are tried: (queries per block, keys per block, widest head).
_HALF_SM80 = (
    (64, 64, 64),
    (128, 64, 96),
    (128, 128, 128),
    (64, 64, 128),
    (128, 64, 1 << 16),
    (64, 64, 1 << 16),
)
_HALF_SM70 = ((64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, 1 << 16), (64, 64, 1 << 16))
_FLOAT_SM80 = ((64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, 1 << 16), (64, 64, 1 << 16))
_SMALL = ((64, 64, 64), (64, 64, 128), (64, 64, 1 << 16))
_WIDE_SHARED_MEMORY = 128 << 10  # below this a block of 128 x 128 halves or 128 x 64 floats does not fit


def _backward_kernel(half: bool, widest: int, dropout: bool, ctx: KernelContext) -> tuple[int, int, int]:
    """The first kernel of cutlassB.h that takes the head size and fits the card's shared memory."""
    kernels: tuple[tuple[int, int, int], ...]
    if ctx.sm >= 80:
        kernels = _HALF_SM80 if half else _FLOAT_SM80
    else:
        kernels = _HALF_SM70 if half and ctx.sm >= 70 else _SMALL
    wide = ctx.spec.shared_memory_per_block_optin >= _WIDE_SHARED_MEMORY
    for queries, keys, limit in kernels:
        if widest > limit:
            continue
        if limit == 96 and (dropout or ctx.sm not in (86, 89)):
            continue
        if not wide and ctx.sm >= 80 and (keys == 128 or (not half and queries == 128)):
            continue
        return queries, keys, limit
    return kernels[-1]


def _efficient_backward(
    shape: tuple[int, int, int, int, int, int],
    half: bool,
    dropout: bool,
    split_limit: int | None,
    ctx: KernelContext,
    preceding: int,
) -> list[int]:
    """Row sums and the staging area of ``AttentionBackwardKernel::Params::workspace_size``.

    Args:
        shape: batch, heads, queries, keys, head size, head size of the values.
        half: the inputs are 16 bits wide.
        split_limit: ``num_splits_key`` of the call.
        preceding: blocks that are taken before these.
    """
    batch, heads, length, keys, size, value_size = shape
    block_q, block_k, limit = _backward_kernel(half, max(size, value_size), dropout, ctx)
    in_registers = half and limit <= block_q
    stage_kv = half and not in_registers
    splits = ceil_div(keys, block_k)
    if split_limit is not None:
        splits = min(splits, split_limit)
    else:
        if batch * heads >= 256 and keys <= 2 * block_k:
            splits = 1
        if stage_kv:
            splits = min(splits, 200 // (batch * heads))
    if ctx.sm < 70 or splits < 1 or ctx.deterministic:
        splits = 1
    elements = 0
    if stage_kv:
        elements += splits * block_k * (round_up(size, block_q) + round_up(value_size, block_q))
    if ctx.sm >= 70 or half:
        tiles = ceil_div(length, block_q) * ceil_div(size, block_k)
        elements += tiles * (16 + _FLOAT * block_q * block_k) // _FLOAT
    workspace = batch * heads * round_up(elements, 4) * _FLOAT
    rows = batch * heads * length * _FLOAT
    if half and (in_registers or not 70 <= ctx.sm < 75):
        return [rows, workspace]
    # Row sums by torch ops: the product of the output and its gradient in fp32, its sums, and these laid out by heads.
    product = batch * length * heads * value_size * _FLOAT
    taken = [product] * (3 if half else 1) + [rows]
    gone = [given_back(preceding + number) for number in range(len(taken), 0, -1)]
    return [*taken, rows, *gone, workspace]


def _head_gradients(shape: tuple[int, int, int, int, int, int], key_heads: int, element: int) -> list[int]:
    """Gradients of keys and values for every query head, which are summed where heads share them (since 2.14:
    ``grad_key_ptr`` of kernel_backward.h, and the sums in ``_efficient_attention_backward``)."""
    batch, heads, _, keys, size, value_size = shape
    rows = batch * heads * keys * element
    return [] if key_heads == heads else [rows * size, rows * value_size]


def _sdp_efficient_backward(call: OpCall) -> Extras | None:
    grad, query, key, value = call.args[:4]
    batch, heads, length, size = query.shape
    dropout = call.argument(9, "dropout_p", 0.0) > 0
    chunk = _MOST_BATCHES if _is_chunked(batch, call.context) else batch
    shape = (chunk, heads, length, key.shape[2], size, value.shape[3])
    first = _head_gradients(shape, key.shape[1], query.element_size())
    copy = _copy_unless(grad.transpose(1, 2).is_contiguous(), grad)
    if chunk != batch:  # gradients of one chunk, then copied
        parts = [copy, *(nbytes(tensor) for tensor in (query, key, value))]
        first = [size // batch * chunk for size in parts if size] + first
    sums = _efficient_backward(shape, query.element_size() == 2, dropout, None, call.context, len(first))
    return _extras([copy] if chunk == batch else [], [*first, *sums])


def _plain_efficient_backward(call: OpCall) -> Extras | None:
    grad, query, key, value = call.args[:4]
    batch, length, heads, size = query.shape
    keys = key.shape[1]
    lengths = call.argument(6, "cu_seqlens_q")
    if lengths is not None:
        batch = lengths.numel() - 1
        length, keys = call.argument(8, "max_seqlen_q"), call.argument(9, "max_seqlen_k")
    dropout = call.argument(11, "dropout_p", 0.0) > 0
    shape = (batch, heads, length, keys, size, value.shape[3])
    splits = call.kwargs.get("num_splits_key")
    first = _head_gradients(shape, key.shape[2], query.element_size()) if lengths is None else []
    half = query.element_size() == 2
    after = first + _efficient_backward(shape, half, dropout, splits, call.context, len(first))
    return _extras([_copy_unless(grad.is_contiguous(), grad)], after)


# -- math ----------------------------------------------------------------------------------------------------


def _safe_softmax(call: OpCall) -> Extras | None:
    """transformers/attention.cpp, ``_safe_softmax``: the softmax, the mask of -inf, its rows, and two
    scalars."""
    source = call.args[0]
    if not source.dim():
        return None
    rows = source.numel() // source.shape[call.args[1]] if source.numel() else 0
    element = call.out.element_size()
    return _extras([nbytes(call.out), element, source.numel(), rows, element], [])


RULES: dict[OpOverload, Rule] = table(
    {
        "_scaled_dot_product_flash_attention": _sdp_flash_forward,
        "_flash_attention_forward": _plain_flash_forward,
        "_scaled_dot_product_flash_attention_backward": _sdp_flash_backward,
        "_flash_attention_backward": _plain_flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient_forward_rule,
        "_efficient_attention_forward": _plain_efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": _sdp_efficient_backward,
        "_efficient_attention_backward": _plain_efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_safe_softmax": _safe_softmax,
    }
)
