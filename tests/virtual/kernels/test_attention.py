import pytest
import torch

from vramfit.virtual.kernels import METAS, Extras
from vramfit.virtual.kernels.attention import flash_splits
from vramfit.virtual.kernels.rules import given_back

from .support import FAKE, ask, aten, context, cuda, extras

HALF = torch.bfloat16


STATE = 16  # a second random state


def test_flash_forward_splits_nothing_when_the_card_is_full():
    # A100: 108 SMs, counted twice: 4 x 32 heads x 16 blocks of 64 queries = 2048 >= 0.8 x 216
    query = cuda(4, 32, 1024, 64, dtype=HALF)
    found = ask(aten._scaled_dot_product_flash_attention.default, query, query, query)
    assert found == Extras(after=(STATE,))


def test_flash_forward_splits_the_keys_of_a_decoding_step():
    # One query, 32 heads, 2048 keys of size 128: 32 blocks for 216 slots; 2048 / 128 = 16 key blocks.
    # Waves 32 s / 216: efficiencies 0.15, 0.30, 0.44, 0.59, 0.74, 0.89 (s=6: 192/216) ... among eligible
    # s = 1, 2, 3, 4, 6 (16/5 = 4 blocks like s=4; 16/6 = 3), 8 (2 blocks: 256/216 -> 0.59), 16 (512/216 ->
    # 0.79). The best is 0.89 at s = 6, and the first within 85 % of it (0.756) is s = 6.
    assert flash_splits(32, 216, 16) == 6
    query, key = cuda(1, 32, 1, 128, dtype=HALF), cuda(1, 32, 2048, 128, dtype=HALF)
    found = ask(aten._scaled_dot_product_flash_attention.default, query, key, key)
    assert found == Extras(after=(6 * 32 * 4, 6 * 32 * 128 * 4, STATE))
    with_dropout = ask(aten._scaled_dot_product_flash_attention.default, query, key, key, 0.1)
    assert with_dropout == Extras(after=(STATE,))


def test_flash_forward_swaps_shared_heads_into_queries():
    # 32 query heads on 8 key heads, one query: 8 heads of 4 queries each, 8 blocks for 216 slots, 16 key
    # blocks: waves 8 s / 216; eligible s = 1, 2, 3, 4, 6, 8, 16; 16 splits give 128 / 216, the most.
    query, key = cuda(1, 32, 1, 128, dtype=HALF), cuda(1, 8, 2048, 128, dtype=HALF)
    found = ask(aten._scaled_dot_product_flash_attention.default, query, key, key)
    assert found == Extras(after=(16 * 8 * 4 * 4, 16 * 8 * 4 * 128 * 4, STATE))


def flash_backward(grad, query, key, out, ctx=None):
    lse = cuda(*query.shape[:3])
    seed = cuda(2, dtype=torch.uint64)
    args = (grad, query, key, key, out, lse, None, None, query.shape[2], key.shape[2], 0.0, True, seed, seed)
    return extras(aten._scaled_dot_product_flash_attention_backward.default, args, {}, None, ctx or context())


def heads_last(batch, heads, length, size):
    """As (batch, heads, length, size), laid out as (batch, length, heads, size)."""
    with FAKE:
        return cuda(batch, length, heads, size, dtype=HALF).transpose(1, 2)


def test_flash_backward_accumulates_dq_in_float32():
    # 1000 queries round up to 1024, heads of 80 to 96: row sums 2 x 16 x 1024 x 4, dQ 2 x 1024 x 16 x 96 x 4.
    query = heads_last(2, 16, 1000, 80)
    assert flash_backward(query, query, query, query) == Extras(after=(131_072, 12_582_912))


def test_flash_backward_copies_what_is_not_laid_out_by_length():
    query, dense = heads_last(2, 16, 128, 64), cuda(2, 16, 128, 64, dtype=HALF)
    found = flash_backward(dense, query, query, query)
    assert found is not None
    assert found.before == (2 * 16 * 128 * 64 * 2,)


def test_flash_backward_expands_shared_heads():
    query, key = heads_last(2, 16, 128, 64), heads_last(2, 4, 256, 64)
    found = flash_backward(query, query, key, query)
    expanded = 2 * 256 * 16 * 64 * 2
    assert found == Extras(after=(2 * 16 * 128 * 4, 2 * 128 * 16 * 64 * 4, expanded, expanded))


def test_deterministic_flash_backward_keeps_an_accumulator_per_split():
    # A100: (108 + 32 - 1) // 32 = 4 splits
    query = heads_last(2, 16, 128, 64)
    found = flash_backward(query, query, query, query, context(deterministic=True))
    assert found is not None
    assert found.after[1] == 4 * 2 * 128 * 16 * 64 * 4


def test_varlen_backward_pads_every_sequence_by_128_rows():
    query = cuda(300, 8, 64, dtype=HALF)
    lengths = cuda(4, dtype=torch.int32)  # three sequences
    lse = cuda(8, 300)
    args = (query, query, query, query, query, lse, lengths, lengths, 128, 128, 0.0, False, lse, lse)
    found = extras(aten._flash_attention_backward.default, args, {}, None, context())
    assert found == Extras(after=(8 * (300 + 384) * 4, 8 * (300 + 384) * 64 * 4))


@pytest.mark.parametrize(("size", "accumulator"), [(128, None), (160, 2 * 8 * 64 * 160 * 4)])
def test_efficient_forward_accumulates_wide_heads_in_memory(size, accumulator):
    query = cuda(2, 8, 64, size, dtype=HALF)
    found = ask(aten._scaled_dot_product_efficient_attention.default, query, query, query, None, False)
    assert found == (Extras(after=(accumulator,)) if accumulator else None)
    single = cuda(2, 8, 64, size)
    assert (
        ask(aten._scaled_dot_product_efficient_attention.default, single, single, single, None, False) is None
    )


def efficient_backward(query, key, ctx):
    lse, seed = cuda(*query.shape[:3]), cuda()
    args = (query, query, key, key, None, query, lse, seed, seed, 0.0, [True, True, True, False])
    return extras(aten._scaled_dot_product_efficient_attention_backward.default, args, {}, None, ctx)


def test_efficient_backward_stages_dq_tiles():
    # Heads of 64 in halves: blocks of 64 x 64, outputs in registers, so only dQ is staged: 512 / 64 = 8
    # blocks of one column tile, each 16 + 4 x 64 x 64 bytes = 16,400, for 2 x 8 heads. Row sums 2 x 8 x 512
    # x 4.
    query = heads_last(2, 8, 512, 64)
    found = efficient_backward(query, query, context())
    assert found == Extras(after=(2 * 8 * 512 * 4, 2 * 8 * 8 * 16_400))


def test_efficient_backward_of_float32_sums_rows_with_torch():
    # Float32 never computes row sums in the kernel and never stages dK and dV (the accumulator has their
    # dtype). 2 x 8 heads, 8 tiles of 16,400 bytes; rows twice: the sum and its contiguous transpose.
    with FAKE:
        query = cuda(2, 512, 8, 64).transpose(1, 2)
    rows, workspace = 2 * 8 * 512 * 4, 2 * 8 * 8 * 16_400
    product = 2 * 512 * 8 * 64 * 4
    summed = (product, rows, rows, given_back(2), given_back(1), workspace)  # as recorded (gpt2-small-fp32)
    assert efficient_backward(query, query, context()) == Extras(after=summed)


def test_efficient_backward_takes_narrower_blocks_on_small_shared_memory():
    # Heads of 128: A100 runs 128 x 128 blocks in registers; an RTX 4090 has 99 KiB and stages dK and dV too.
    query = heads_last(1, 2, 256, 128)
    on_a100 = efficient_backward(query, query, context("A100 80GB"))
    assert on_a100 == Extras(after=(2 * 256 * 4, 2 * 2 * (16 + 4 * 128 * 128)))
    # 64 x 64 blocks, limit 128 > 64: staged. splits = min(256 / 64, 200 // 2) = 4; gk = gv = 4 x 64 x 128
    # elements; dQ: 4 row blocks x 2 column tiles x 16,400 bytes = 32,800 elements; together 98,336 elements
    # a head.
    on_4090 = efficient_backward(query, query, context("RTX 4090"))
    assert on_4090 == Extras(after=(2 * 256 * 4, 2 * 98_336 * 4))


def test_safe_softmax_keeps_softmax_mask_and_rows():
    scores = cuda(2, 4, 16, 32)
    found = ask(aten._safe_softmax.default, scores, -1)
    count = 2 * 4 * 16 * 32
    assert found == Extras(before=(count * 4, 4, count, count // 32, 4))


def test_packed_single_queries_of_grouped_heads_split_their_keys():
    # Four sequences of one query: 8 key heads x 4 queries each, as in the dense case of batch 4: 32 blocks of
    # queries for 216 slots and 16 blocks of keys give 6 splits.
    query, key = cuda(4, 32, 128, dtype=HALF), cuda(8192, 8, 128, dtype=HALF)
    lengths = cuda(5, dtype=torch.int32)
    args = (query, key, key, lengths, lengths, 1, 2048, 0.0, False, False)
    op = aten._flash_attention_forward.default
    found = extras(op, args, {}, None, context())
    assert flash_splits(4 * 8, 216, 16) == 6
    assert found == Extras(after=(6 * 4 * 8 * 4 * 4, 6 * 4 * 8 * 4 * 128 * 4, STATE))
    assert extras(op, args, {"window_size_left": 100}, None, context()) is None
    assert extras(op, (*args[:5], 4, *args[6:]), {}, None, context()) is None


def test_a_program_may_ask_for_splits():
    query = cuda(1, 1024, 32, 64, dtype=HALF)
    args = (query, query, query, None, None, 1024, 1024, 0.0, False, False)
    op = aten._flash_attention_forward.default
    assert extras(op, args, {}, None, context()) == Extras(after=(STATE,))
    found = extras(op, args, {"num_splits": 2}, None, context())
    assert found == Extras(after=(2 * 32 * 1024 * 4, 2 * 32 * 1024 * 64 * 4, STATE))


def test_batches_above_65535_are_computed_in_chunks():
    # _scaled_dot_product_efficient_attention_cuda: results of 65,535 samples before those of all 70,000
    query = cuda(70_000, 1, 8, 32, dtype=HALF)
    op = aten._scaled_dot_product_efficient_attention.default
    found = ask(op, query, query, query, None, True)
    assert found == Extras(before=(65_535 * 8 * 32 * 2, 65_535 * 32 * 4))
    with FAKE:
        grad = cuda(70_000, 8, 1, 32, dtype=HALF).transpose(1, 2)
    args = (grad, query, query, query, None, query, cuda(70_000, 1, 32), cuda(), cuda(), 0.0, [True] * 3)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    found = extras(backward, (*args[:-1], [True, True, True, False]), {}, None, context())
    assert found is not None
    assert found.after[:3] == (65_535 * 8 * 32 * 2,) * 3
    later = context(version=(2, 15))  # launches with an offset
    assert ask(op, query, query, query, None, True, ctx=later) is None
    found = extras(backward, (*args[:-1], [True, True, True, False]), {}, None, later)
    assert found is not None
    assert found.after[0] == 70_000 * 8 * 4  # row sums of all


def test_efficient_backward_sums_gradients_of_shared_heads():
    # A head of keys for four of queries: dK and dV of all eight query heads beside row sums and the workspace.
    query, key = heads_last(2, 8, 512, 64), heads_last(2, 2, 256, 64)
    own = efficient_backward(query, heads_last(2, 8, 256, 64), context(version=(2, 14)))
    shared = efficient_backward(query, key, context(version=(2, 14)))
    assert shared.after == (2 * 8 * 256 * 64 * 2,) * 2 + own.after


# -- corrected outputs


def test_efficient_attention_keeps_its_seed_on_the_host():
    query = cuda(2, 8, 100, 64, dtype=HALF)
    op = aten._scaled_dot_product_efficient_attention.default
    out, lse, seed, offset = METAS[op](FAKE, query, query, query, None, True)
    assert seed.device.type == offset.device.type == "cpu"
    assert out.device.type == "cuda"
    assert lse.shape == (2, 8, 128)  # 100 rounded up to 32s


def test_flash_attention_keeps_its_seed_on_the_card():
    query = cuda(2, 8, 100, 64, dtype=HALF)
    with FAKE:
        results = aten._scaled_dot_product_flash_attention.default(query, query, query)
    assert (results[6].shape, results[6].dtype, results[6].device.type) == ((2,), torch.uint64, "cuda")
    assert (results[7].shape, results[7].device.type) == ((), "cuda")
    assert results[1].shape == (2, 8, 100)
    assert results[8].numel() == 0


def test_cudnn_attention_makes_no_logsumexp_for_inference():
    query = cuda(2, 8, 100, 64, dtype=HALF)
    op = aten._scaled_dot_product_cudnn_attention.default
    assert METAS[op](FAKE, query, query, query, None, False)[1] is None
    assert METAS[op](FAKE, query, query, query, None, True)[1].shape == (2, 8, 100, 1)


@pytest.mark.parametrize(
    "op", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default]
)
def test_a_reduced_loss_keeps_the_storage_of_the_whole(op):
    prediction, target = cuda(32, 100), cuda(32, 100)
    loss = METAS[op](FAKE, prediction, target)
    assert loss.shape == ()
    assert loss.device.type == "cuda"
    assert loss.untyped_storage().nbytes() == 32 * 100 * 4
