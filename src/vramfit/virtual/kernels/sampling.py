"""Drawing at random: multinomial, randperm. Dropout and the fillers need nothing beside their outputs.

aten/src/ATen/native/Distributions.cpp (``multinomial_out``), cuda/MultinomialKernel.cu, cuda/Randperm.cpp. Fused
dropout's mask is an output (cuda/Dropout.cu); ``uniform_``, ``normal_`` and the others fill in place
(cuda/DistributionTemplates.h).
"""

from __future__ import annotations

import math

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.cub import sort_bytes, sort_error
from vramfit.virtual.kernels.reduction import reduce_extras
from vramfit.virtual.kernels.rules import Rule, Scratch, after_outputs, nbytes, table
from vramfit.virtual.kernels.sorting import topk
from vramfit.virtual.op_call import OpCall


def key_bits(count: int) -> int:
    """Bits of the random keys that ``randperm_out_cuda`` sorts: so many that few are drawn twice."""
    size = float(count)
    return min(64, math.ceil(math.log2(size - (6 * size * size + 1) / (math.log(0.9) * 12))))


@after_outputs
def _randperm(call: OpCall, scratch: Scratch) -> None:
    """``randperm_out_cuda``: a range, random keys of 32 or 64 bits, their sorted form, and CUB's storage."""
    count = call.args[0]
    if not isinstance(count, int) or count < 1:
        return
    bits = key_bits(count)
    key, element = 4 if bits <= 32 else 8, call.out.element_size()
    for size in (count * element, count * key, count * key):
        scratch.take(size)
    scratch.use(sort_bytes(count, key, element, call.context, bits=bits))
    scratch.doubt(sort_error(count, key, element, call.context))


@after_outputs
def _multinomial(call: OpCall, scratch: Scratch) -> None:
    """``multinomial_out``: without replacement, or for one draw, noise as large as the weights.

    It divides the weights by exponential noise and takes the largest. Otherwise three copies: of the weights, of
    their normalised form, of its running sum (``multinomial_with_replacement_kernel_impl``).
    """
    weights = call.args[0]
    samples = call.argument(1, "num_samples")
    replacement = call.argument(2, "replacement", False)
    size = nbytes(weights)
    if replacement and samples != 1:
        for _ in range(3):
            scratch.take(size)
        return
    # max() and min(), one after the other
    checking = reduce_extras(weights, None, weights.element_size(), call.context)
    largest = scratch.take(weights.element_size())
    for partial in checking.after if checking else ():
        scratch.use(partial)
    scratch.give(largest)
    scratch.take(size)
    if samples != 1:
        values = weights.new_empty(call.out.shape) if call.out.dim() else weights
        scratch.take(nbytes(values))
        topk(scratch, weights, samples, -1, True, values, call.context)


RULES: dict[OpOverload, Rule] = table(
    {
        ("randperm", "randperm.generator"): _randperm,
        "multinomial": _multinomial,
    }
)
