"""Packing many tensors into one block and unpacking it, FSDP2's way: the tables of addresses and sizes on the card.

aten/src/ATen/native/cuda/TensorShape.cu: both kernels pack vectors of 64-bit numbers into one tensor (``pack_vecs``),
one of which has an entry for each block of threads. ``_chunk_cat`` drops it before it makes its output. FSDP2 calls
them through operators of its own, which are there once it is imported (_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import (
    Rule,
    Scratch,
    after_outputs,
    before_outputs,
    ceil_div,
    is_dense,
    round_up,
    table,
)
from vramfit.virtual.op_call import OpCall

_ENTRY = 8
_BLOCK_THREADS = 128
_TILE = 16 * _BLOCK_THREADS
"""Bytes that a block of threads copies at a time (``TILE_SIZE``)."""


def _dimension(call: OpCall, position: int, of: torch.Tensor) -> int:
    dim = int(call.argument(position, "dim", 0))
    return dim + of.dim() if dim < 0 else dim


def _chunk_cat(call: OpCall, before: Scratch) -> None:
    """``get_chunk_cat_metadata``; tensors that are not dense go another way."""
    tensors: Sequence[torch.Tensor] = call.args[0]
    first = tensors[0]
    dim, chunks = _dimension(call, 1, first), int(call.argument(2, "num_chunks"))
    out = call.argument(3, "out")
    into = first.dtype if out is None else out.dtype
    casts = (first.dtype, into) == (torch.bfloat16, torch.float32)
    if not all(map(is_dense, tensors)) or not (first.dtype == into or casts):
        return
    blocks = 0
    for tensor in tensors:
        padded = round_up(tensor.shape[dim], chunks) * math.prod(tensor.shape[dim + 1 :])
        blocks += ceil_div(padded * into.itemsize // chunks, _TILE)
    # Sources, sizes, padded sizes and blocks of each tensor; where it starts in bytes and in blocks, and where the
    # last one ends.
    before.use(_ENTRY * (blocks + 4 * len(tensors) + 2 * (len(tensors) + 1)))


def _split_copy(call: OpCall, after: Scratch) -> None:
    """``split_with_sizes_copy_out_cuda_contiguous_no_cast``; other types or layouts go another way."""
    whole: torch.Tensor = call.args[0]
    sizes: Iterable[int] = call.args[1]
    outputs: Sequence[torch.Tensor] = call.argument(3, "out")
    dense = is_dense(whole) and all(is_dense(part) and part.dtype == whole.dtype for part in outputs)
    if not dense or not whole.numel():
        return
    dim = _dimension(call, 2, whole)
    parts = [size * whole.stride(dim) * whole.element_size() for size in sizes]
    chunks = math.prod(whole.shape[:dim])
    card = call.context.spec
    most_blocks = card.sm_count * card.max_threads_per_sm // _BLOCK_THREADS * 2
    rounds = ceil_div(sum(ceil_div(part, _TILE) for part in parts) * chunks, most_blocks)
    chunks_each = min(math.ceil(math.sqrt(rounds)), chunks)
    tile = _TILE * ceil_div(rounds, chunks_each)
    blocks = sum(ceil_div(part, tile) for part in parts)
    # Targets, sources and sizes of each part; in which block each begins, and the last one ends.
    after.use(_ENTRY * (blocks + 3 * len(parts) + len(parts) + 1))


_PACK, _UNPACK = before_outputs(_chunk_cat), after_outputs(_split_copy)

RULES: dict[OpOverload, Rule] = table(
    {("_chunk_cat", "_chunk_cat.out"): _PACK, "split_with_sizes_copy.out": _UNPACK}
)
RULES_BY_NAME: dict[str, Rule] = {"fsdp::chunk_cat": _PACK, "fsdp::split_with_sizes_copy": _UNPACK}
