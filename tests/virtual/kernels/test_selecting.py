"""Results whose size depends on data, counting, and drawing at random."""

import pytest
import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.cub import reduce_bytes, select_bytes, sort_bytes
from vramfit.virtual.kernels.rules import given_back
from vramfit.virtual.kernels.sampling import key_bits

from .support import FAKE, ask, aten, context, cuda, extras


def test_nonzero_counts_first_and_then_writes_positions():
    mask, ctx = cuda(1_000_000, dtype=torch.bool), context()
    found = extras(aten.nonzero.default, (mask,), {}, cuda(30, 1, dtype=torch.int64), ctx)
    counting, selecting = reduce_bytes(1_000_000, 4, ctx), select_bytes(1_000_000, 8)
    assert found is not None
    assert found.before == (4, counting, given_back(2))
    assert found.after == (selecting, given_back(1))


def test_static_nonzero_counts_in_blocks():
    # 1,000,000 bytes in tiles of 512 x 16 = 8192: 123, fewer than twice 108 blocks
    source = cuda(1_000_000, dtype=torch.bool)
    outputs = cuda(100, 1, dtype=torch.int64)
    found = extras(aten.nonzero_static.default, (source,), {"size": 100}, outputs, context())
    assert found == Extras(after=(123 * 4, 123 * 8))


def test_masked_select_holds_the_positions_of_what_it_takes():
    values, mask = cuda(1000, 64), cuda(1000, 64, dtype=torch.bool)
    found = extras(aten.masked_select.default, (values, mask), {}, cuda(500), context())
    assert found is not None
    assert found.before[3] == 500 * 2 * 8  # two dimensions, an int64 each
    rows = cuda(1000, 1, dtype=torch.bool)
    broadcast = extras(aten.masked_select.default, (values, rows), {}, cuda(500), context())
    assert broadcast is not None
    assert broadcast.before[0] == 64_000  # the mask at its full size


@pytest.mark.parametrize("inverse", [False, True])
def test_unique_sorts_a_copy(inverse):
    source, ctx = cuda(100_000, dtype=torch.int64), context()
    outputs = (cuda(50, dtype=torch.int64), source, cuda(0, dtype=torch.int64))
    found = extras(aten._unique2.default, (source, True, inverse), {}, outputs, ctx)
    assert found is not None
    if inverse:  # sorted, a range, its order; CUB's storage; the range goes
        sort = sort_bytes(100_000, 8, 8, ctx)
        assert found.before == (800_000, 800_000, 800_000, sort, given_back(4), given_back(2))
    else:
        assert found.before == (800_000, sort_bytes(100_000, 8, 0, ctx), given_back(2))
    assert found.error_bytes > 0


def test_unique_booleans_are_only_counted():
    source = cuda(100_000, dtype=torch.bool)
    outputs = (cuda(2, dtype=torch.bool), source, source)
    found = extras(aten._unique2.default, (source,), {}, outputs, context())
    assert found is not None
    assert sum(size for size in found.before if size > 0) < 100_000


def test_histograms_look_for_their_bounds():
    found = extras(aten.histc.default, (cuda(1000), 10), {}, cuda(10), context())
    assert found == Extras(before=(4, given_back(1), 4, given_back(2)))
    halves = cuda(1000, dtype=torch.float16)
    weighted = extras(aten.bincount.default, (cuda(1000, dtype=torch.int64), halves), {}, cuda(10), context())
    assert weighted is not None
    assert weighted.before[-1] == 8000


def test_searching_in_other_types_converts_both():
    bounds, values = cuda(100), cuda(5000, dtype=torch.float64)
    assert ask(aten.searchsorted.Tensor, bounds, values) == Extras(after=(800,))
    assert ask(aten.bucketize.Tensor, values, bounds) == Extras(after=(800,))
    assert ask(aten.searchsorted.Tensor, bounds, cuda(5000)) is None
    with FAKE:
        strided = cuda(100, 50).t()
    assert ask(aten.searchsorted.Tensor, bounds, strided) == Extras(after=(20_000,))


def test_permutations_sort_random_keys():
    # log2(n - (6 n^2 + 1) / (12 ln 0.9)): 100,000 gives 35.46, so 36 bits and 64-bit keys; 10,000 gives 28.8
    assert (key_bits(100_000), key_bits(10_000)) == (36, 29)
    ctx = context()
    found = extras(aten.randperm.default, (100_000,), {}, cuda(100_000, dtype=torch.int64), ctx)
    assert found is not None
    assert found.after[:4] == (800_000, 800_000, 800_000, sort_bytes(100_000, 8, 8, ctx, bits=36))
    small = extras(aten.randperm.default, (10_000,), {}, cuda(10_000, dtype=torch.int64), ctx)
    assert small is not None
    assert small.after[:3] == (80_000, 40_000, 40_000)


def test_drawing_tokens_makes_noise_as_large_as_the_weights():
    weights = cuda(8, 32_000)
    found = ask(aten.multinomial.default, weights, 1)
    assert found is not None
    assert found.after[-1] == 8 * 32_000 * 4
    several = ask(aten.multinomial.default, weights, 5)
    assert several is not None
    assert 8 * 5 * 4 in several.after  # the noisy values of those drawn


def test_drawing_with_replacement_keeps_three_copies_of_the_weights():
    size = 8 * 32_000 * 4
    assert ask(aten.multinomial.default, cuda(8, 32_000), 5, True) == Extras(after=(size, size, size))
