"""Embedding tables: sorted indices, segments of equal ones, their partial sums."""

import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.cub import scan_bytes, sort_bytes, unique_by_key_bytes
from vramfit.virtual.kernels.rules import given_back

from .support import FAKE, ask, aten, context, cuda, extras


def embedding(tokens, weights=50_257, width=768, dtype=torch.float32, ctx=None, by_frequency=False):
    grad, indices = cuda(tokens, width, dtype=dtype), cuda(tokens, dtype=torch.int64)
    return ask(aten.embedding_dense_backward.default, grad, indices, weights, -1, by_frequency, ctx=ctx)


def test_few_tokens_need_nothing():
    assert embedding(3072) is None
    assert embedding(3073) is not None


def test_repeated_tokens_are_sorted_and_their_rows_summed():
    # 4096 tokens of 768 on an A100: at most 4096 segments and 4096 / 10 + 4096 = 4505 parts of ten rows.
    # 4096 x 768 / 768 = 4096 blocks >= 108 x 4, so the parts are summed in two steps: a row of floats a part.
    ids, ctx = 4096 * 8, context()
    found = embedding(4096, ctx=ctx)
    assert found is not None
    sort = sort_bytes(4096, 8, 8, ctx)
    assert found.before == (ids, ids, ids, sort, given_back(4), given_back(3))  # sorted, origin, a range
    unique, scan = unique_by_key_bytes(4096, 8, ctx), scan_bytes(4096, 8)
    assert found.after == (
        *(ids, 8, ids, unique, given_back(4), given_back(3), ids, ids, scan, given_back(7)),
        *(8, 4505 * 8, 4505 * 768 * 4),
    )


def test_a_small_table_is_summed_atomically():
    # 100,000 tokens of 128 into 64 rows: 64 blocks < 432, and 10,064 parts > 4 x 64. Float32 sums in place,
    # halves into a float32 table.
    single = embedding(100_000, weights=64, width=128)
    half = embedding(100_000, weights=64, width=128, dtype=torch.bfloat16)
    assert single is not None and half is not None
    assert single.after[-1] == 10_064 * 8
    assert half.after == (*single.after, 64 * 128 * 4)
    deterministic = embedding(100_000, weights=64, width=128, ctx=context(deterministic=True))
    assert deterministic is not None
    assert deterministic.after[-1] == 10_064 * 128 * 4


def test_scaling_by_frequency_counts_and_always_sorts():
    found = embedding(100, by_frequency=True)
    assert found is not None
    assert found.before[:4] == (800, 800, 800, 1)
    assert found.before[6] == 800  # how often each occurs


def test_strided_gradients_are_copied_even_for_few_tokens():
    with FAKE:
        grad = cuda(768, 100).t()
    args = (grad, cuda(100, dtype=torch.int64), 1000, -1, False)
    assert ask(aten.embedding_dense_backward.default, *args) == Extras(before=(768 * 100 * 4,))


def bag(mode, tokens=5000):
    grad, indices = cuda(50, 64), cuda(tokens, dtype=torch.int64)
    args = (grad, indices, indices, cuda(50, dtype=torch.int64), indices, 1000, False, mode, None)
    return extras(aten._embedding_bag_dense_backward.default, args, {}, cuda(1000, 64), context())


def test_bags_are_sorted_unless_their_largest_is_taken():
    assert bag(2) is None
    summed = bag(0)
    assert summed is not None
    assert summed.before[:3] == (40_000, 40_000, 40_000)
    assert summed.after[-1] == (500 + 1000) * 64 * 4  # bags always sum in two steps
    few = bag(1, tokens=10)  # and always sort
    assert few is not None
    assert few.before[:4] == (80, 80, 80, 1)


def test_limiting_norms_sorts_the_indices():
    table, indices = cuda(1000, 64), cuda(200, dtype=torch.int64)
    args = (table, indices, 1.0, 2.0)
    found = extras(aten.embedding_renorm_.default, args, {}, table, context())
    assert found is not None
    assert found.before[:4] == (1600, 1600, 1600, given_back(3))
