"""Drawing at random: multinomial, randperm. Dropout and the fillers need nothing beside their outputs.

aten/src/ATen/native/Distributions.cpp (``multinomial_out``), cuda/MultinomialKernel.cu, cuda/Randperm.cpp. Fused
dropout's mask is an output (cuda/Dropout.cu); ``uniform_``, ``normal_`` and the others fill in place
(cuda/DistributionTemplates.h).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vramfit.virtual.kernels.context import Args, Extras, KernelContext, Kwargs, Rule, argument, nbytes, table
from vramfit.virtual.kernels.cub import sort_bytes, sort_error
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.scratch import Scratch, sequence
from vramfit.virtual.kernels.sorting import topk


def key_bits(count: int) -> int:
    """Bits of the random keys that ``randperm_out_cuda`` sorts: so many that few are drawn twice."""
    size = float(count)
    return min(64, math.ceil(math.log2(size - (6 * size * size + 1) / (math.log(0.9) * 12))))


def _randperm(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``randperm_out_cuda``: a range, random keys of 32 or 64 bits, their sorted form, and CUB's storage."""
    del kwargs
    count = args[0]
    if not isinstance(count, int) or count < 1:
        return None
    bits = key_bits(count)
    key, element = 4 if bits <= 32 else 8, outputs.element_size()
    scratch = Scratch()
    for size in (count * element, count * key, count * key):
        scratch.take(size)
    scratch.use(sort_bytes(count, key, element, ctx, bits=bits))
    scratch.doubt(sort_error(count, key, element, ctx))
    return sequence(after=scratch)


def _multinomial(args: Args, kwargs: Kwargs, outputs: Any, ctx: KernelContext) -> Extras | None:
    """``multinomial_out``: without replacement, or for one draw, noise as large as the weights.

    It divides the weights by exponential noise and takes the largest. Otherwise three copies: of the weights, of
    their normalised form, of its running sum (``multinomial_with_replacement_kernel_impl``).
    """
    weights = args[0]
    samples = argument(args, kwargs, 1, "num_samples")
    replacement = argument(args, kwargs, 2, "replacement", False)
    size = nbytes(weights)
    scratch = Scratch()
    if replacement and samples != 1:
        for _ in range(3):
            scratch.take(size)
        return sequence(after=scratch)
    checking = reduce_extras(
        weights, None, weights.element_size(), ctx
    )  # max() and min(), one after the other
    largest = scratch.take(weights.element_size())
    for partial in checking.after if checking else ():
        scratch.use(partial)
    scratch.give(largest)
    scratch.take(size)
    if samples != 1:
        values = weights.new_empty(outputs.shape) if outputs.dim() else weights
        scratch.take(nbytes(values))
        topk(scratch, weights, samples, -1, True, values, ctx)
    return sequence(after=scratch)


RULES: dict[torch._ops.OpOverload, Rule] = table(
    {
        ("randperm", "randperm.generator"): _randperm,
        "multinomial": _multinomial,
    }
)
