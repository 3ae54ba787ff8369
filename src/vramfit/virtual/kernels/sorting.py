"""Sorting and selecting: sort, argsort, topk, cumulative sums, unique, nonzero, random permutations,
multinomial.

aten/src/ATen/native/cuda/Sort.cpp (``sort_cuda_kernel``), SortStable.cu (``launch_stable_sort_kernel``),
TensorTopK.cpp and TensorTopK.cu, ScanKernels.cu, Unique.cu, Nonzero.cu, Randperm.cu, MultinomialKernel.cu.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.kernels.context import (
    Args,
    Extras,
    KernelContext,
    Kwargs,
    Rule,
    argument,
    ceil_div,
    nbytes,
    round_up,
    table,
    temporaries,
    workspace,
)
from vramfit.virtual.kernels.cub import scan_bytes, sort_bytes, sort_error

_SMALL_SORT = 4096  # Sort.h, should_use_small_sort: sorted in place by one block per slice
_INDEX = 8


def _is_small(length: int) -> bool:
    return length <= _SMALL_SORT


def stable_sort_sizes(count: int, length: int, element: int, ctx: KernelContext) -> list[int]:
    """Temporaries of ``launch_stable_sort_kernel``: index arrays and CUB's storage.

    Args:
        count: elements in all, at most 2**31 - 1 at a time.
        length: elements of one slice.
        element: bytes of an element.
        ctx: the card.
    """
    count = min(count, (2**31 - 1) // length * length)
    segments = count // length
    if segments == 1 or length >= 1_000_000:
        return [length * _INDEX, sort_bytes(length, element, _INDEX, ctx)]
    if segments < 128:  # sort everything by value, then stably by segment
        pairs = count * 8
        by_value = [count * element, sort_bytes(count, element, 8, ctx)]
        by_segment = [sort_bytes(count, 4, 8, ctx, bits=max(1, (segments - 1).bit_length())), count * 4]
        return [pairs, pairs, *max(by_value, by_segment, key=sum)]
    # Segmented sort: indices of every slice, and CUB's second set of keys and values.
    return [count * _INDEX, round_up(count * element, 256) + round_up(count * _INDEX, 256) + 255]


def _sort(source: torch.Tensor, dim: int, ctx: KernelContext) -> Extras | None:
    if not source.numel() or not source.dim():
        return None
    length = source.shape[dim]
    if length == 1 or _is_small(length):
        return None
    copy = 0 if source.stride(dim) == 1 and source.is_contiguous() else nbytes(source)
    # Sorted beside the outputs, then copied into them.
    results = copy + source.numel() * _INDEX if copy else 0
    sizes = stable_sort_sizes(source.numel(), length, source.element_size(), ctx)
    return temporaries(copy, results, *sizes, error_bytes=sort_error(source.numel(), ctx))


def _sort_rule(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    del outputs
    return _sort(args[0], argument(args, kwargs, 1, "dim", -1), ctx)


def _sort_stable_rule(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``sort.stable(self, *, stable, dim, descending)``."""
    del outputs
    return _sort(args[0], kwargs.get("dim", -1), ctx)


def _argsort(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``argsort`` throws the sorted values away (native/Sorting.cpp)."""
    source, dim = args[0], kwargs.get("dim", argument(args, kwargs, 1, "dim", -1))
    sorting = _sort(source, dim if isinstance(dim, int) and not isinstance(dim, bool) else -1, ctx)
    del outputs
    rest = sorting.after if sorting else ()
    return Extras((nbytes(source),), rest, sorting.error_bytes if sorting else 0) if source.numel() else None


def _topk(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``topk_out_cuda``: few long slices are sorted whole; else radix selection, then a sort of the k
    found."""
    source, k = args[0], argument(args, kwargs, 1, "k")
    dim = argument(args, kwargs, 2, "dim", -1)
    if not source.dim() or not source.numel() or not k:
        return None
    length = source.shape[dim]
    slices = source.numel() // length
    copy = 0 if source.is_contiguous() else nbytes(source)
    if source.dtype is not torch.bool and slices <= 10 and length >= 100_000:  # should_use_sort
        whole = [nbytes(source), source.numel() * _INDEX]
        sizes = stable_sort_sizes(source.numel(), length, source.element_size(), ctx)
        return temporaries(copy, *whole, *sizes, error_bytes=sort_error(source.numel(), ctx))
    sizes = [copy, *_multi_block_sizes(slices, length, source.element_size(), ctx)]
    if argument(args, kwargs, 4, "sorted", True) and not _is_small(k):
        values = outputs[0]
        sizes += [nbytes(values), values.numel() * _INDEX]
        sizes += stable_sort_sizes(values.numel(), k, values.element_size(), ctx)
    return temporaries(*sizes)


# should_use_multiblock: slices up to this many, of at least so many elements.
_MULTI_BLOCK = (
    (20, 20_000),
    (40, 10_000),
    (80, 8_000),
    (199, 5_000),
    (799, 3_000),
    (4_000, 800),
    (1 << 32, 400),
)


def _multi_block_sizes(slices: int, length: int, element: int, ctx: KernelContext) -> list[int]:
    """Buffers of the selection that gives each slice several blocks (TensorTopK.cu, ``mbtopk::launch``).

    The k-th value, ranks still wanted and digits found of each slice, digit counts of each block and their
    sums over each slice, two running counts a block. Blocks have 256 threads of 4 to 64 elements each
    (``get_items_per_thread``), so that six blocks fill an SM.
    """
    if length < next(least for most, least in _MULTI_BLOCK if slices <= most):
        return []
    per_thread = ceil_div(slices * length, ctx.spec.sm_count * 6 * 256)
    blocks = slices * ceil_div(length, 256 * max(4, min(per_thread, 64)))
    digits = 2 * slices * max(4, element)
    return [slices * element, slices * 8, digits, blocks * 512, slices * 1024, blocks * 4, blocks * 4]


def _scan(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``cumsum`` and its like: one long row goes through CUB, others need nothing (ScanUtils.cuh,
    ``scan_dim``)."""
    del ctx
    source, dim = args[0], argument(args, kwargs, 1, "dim", -1)
    if not source.numel() or not source.dim():
        return None
    out = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    copy = 0 if source.is_contiguous() else nbytes(source)
    cub = scan_bytes(source.numel(), out.element_size()) if source.numel() == source.shape[dim] else 0
    return temporaries(copy, cub, error_bytes=4096 if cub else 0)


def _unique(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``_unique2``: a sorted copy (with its order, if wanted), and CUB's storage (Unique.cu,
    UniqueCub.cu)."""
    del outputs
    source = args[0]
    count, element = source.numel(), source.element_size()
    if not count:
        return None
    ordered = argument(args, kwargs, 2, "return_inverse", False)
    counted = argument(args, kwargs, 3, "return_counts", False)
    sizes = [count * element, sort_bytes(count, element, _INDEX if ordered else 0, ctx)]
    if ordered:
        sizes += [count * _INDEX] * 4  # range, order, and places of first occurrences
    if counted:
        sizes += [count * _INDEX]
    return workspace(*sizes, error_bytes=sort_error(count, ctx) + count * _INDEX)


def _nonzero(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``nonzero_cuda_out_impl``: the count, CUB's reduction, then flat positions (Nonzero.cu)."""
    del kwargs, outputs, ctx
    count = args[0].numel()
    if not count:
        return None
    copy = 0 if args[0].is_contiguous() else nbytes(args[0])
    return Extras(tuple(s for s in (copy, 4, 1024) if s), (scan_bytes(count, 4),), error_bytes=4096)


def _randperm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``randperm_out_cuda``: random keys, their sorted form, a range, and CUB's storage (Randperm.cpp)."""
    del kwargs
    count = args[0]
    if not isinstance(count, int) or count < 2:
        return None
    bits = min(64, 3 * (count - 1).bit_length() + 12)  # enough that the same key is rarely drawn twice
    key = 4 if bits <= 32 else 8
    element = outputs.element_size()
    sizes = [count * key, count * key, count * element, sort_bytes(count, key, element, ctx, bits=bits)]
    return temporaries(*sizes, error_bytes=sort_error(count, ctx))


def _multinomial(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``multinomial_out``: without replacement, noise as large as the weights; with it, their cumulative sum.

    native/Distributions.cpp divides the weights by exponential noise and takes the largest;
    MultinomialKernel.cu copies, sums and normalises them.
    """
    del ctx
    weights = args[0]
    samples = argument(args, kwargs, 1, "num_samples")
    replacement = argument(args, kwargs, 2, "replacement", False)
    size = nbytes(weights)
    if not replacement or samples == 1:
        return temporaries(size)
    rows = outputs.numel() // samples
    return temporaries(size, size, rows * weights.element_size(), outputs.numel() * weights.element_size())


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        "sort": _sort_rule,
        "sort.stable": _sort_stable_rule,
        ("argsort", "argsort.stable"): _argsort,
        "topk": _topk,
        ("cumsum", "cumprod", "logcumsumexp", "cumsum_", "cumprod_"): _scan,
        ("_unique2", "unique_consecutive", "_unique"): _unique,
        "nonzero": _nonzero,
        ("randperm", "randperm.generator"): _randperm,
        "multinomial": _multinomial,
    }
)
