"""Fourier transforms: copies that torch makes around cuFFT are exact, cuFFT's work areas are estimates.

aten/src/ATen/native/cuda/SpectralOps.cpp (``_fft_c2c_cufft``, ``_fft_r2c_cufft``, ``_fft_c2r_cufft``, ``_exec_fft``).
A plan's work area is taken for each execution; its twiddle factors lie outside the caching allocator. The library is
closed: its documentation gives eight times the signal as the worst case, and the estimate is the signal once, or
nothing for one short dimension whose length has no factor but 2, 3, 5 and 7, which one kernel transforms.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, Scratch, after_outputs, nbytes, table
from vramfit.virtual.op_call import OpCall

_MOST_DIMS = 3  # cufft_max_ndim
_ONE_KERNEL = 4096  # longest smooth length that one kernel transforms
_WORST = 8  # times the signal


def _is_smooth(length: int) -> bool:
    for factor in (2, 3, 5, 7):
        while length % factor == 0:
            length //= factor
    return length == 1


def _execute(
    scratch: Scratch, source: torch.Tensor, dims: list[int], lengths: list[int], nbytes_: int
) -> None:
    """``_exec_fft``: batch dimensions made one, and the plan's work area.

    Args:
        nbytes_: of the signal as complex numbers.
    """
    batch = [d for d in range(source.dim()) if d not in dims]
    batch.sort(key=lambda d: source.stride()[d], reverse=True)
    collapses = all(
        source.stride(a) == source.stride(b) * source.shape[b] or source.shape[a] == 1
        for a, b in pairwise(batch)
    )
    scratch.take(0 if collapses else nbytes(source))
    smooth = all(_is_smooth(length) for length in lengths)
    area = 0 if smooth and len(dims) == 1 and lengths[0] <= _ONE_KERNEL else nbytes_
    scratch.use(area)
    scratch.doubt((nbytes_ if smooth else (_WORST - 1) * nbytes_, area))


@after_outputs
def _plain(call: OpCall, scratch: Scratch) -> None:
    """``_fft_c2c``: up to three dimensions at a time; beyond that a second tensor of the result's size."""
    source, dims = call.args[0], [d % call.args[0].dim() for d in call.args[1]]
    if not dims or not source.numel():
        return
    if len(dims) > _MOST_DIMS:
        scratch.take(nbytes(call.out))
    dims = sorted(dims, key=lambda d: source.stride()[d])[:_MOST_DIMS]
    _execute(scratch, source, dims, [source.shape[d] for d in dims], nbytes(call.out))


def _at_once(dims: list[int]) -> bool:
    """``use_optimized_cufft_path``: not for transforms that begin with the first two dimensions."""
    return len(dims) <= _MOST_DIMS and not (len(dims) >= 2 and dims[:2] == [0, 1])


@after_outputs
def _from_real(call: OpCall, scratch: Scratch) -> None:
    """``_fft_r2c``: where not all dimensions go at once, a second tensor of the result's size."""
    source = call.args[0]
    dims = [d % source.dim() for d in call.args[1]]
    if not dims or not source.numel():
        return
    if not _at_once(dims):
        scratch.take(nbytes(call.out) if len(dims) > 1 else 0)
        dims = dims[-1:]
    _execute(scratch, source, dims, [source.shape[d] for d in dims], nbytes(call.out))


@after_outputs
def _to_real(call: OpCall, scratch: Scratch) -> None:
    """``_fft_c2r``: of a copy, since cuFFT overwrites its input."""
    source = call.args[0]
    dims = [d % source.dim() for d in call.args[1]]
    if not dims or not source.numel():
        return
    length = call.argument(3, "last_dim_size")
    scratch.take(nbytes(source))
    dense = source if source.is_contiguous() else source.new_empty(source.shape)
    executed = dims if _at_once(dims) else dims[-1:]
    lengths = [source.shape[d] for d in executed[:-1]] + [length]
    _execute(scratch, dense, executed, lengths, nbytes(source))


RULES: dict[OpOverload, Rule] = table(
    {
        "_fft_c2c": _plain,
        "_fft_r2c": _from_real,
        "_fft_c2r": _to_real,
    }
)
