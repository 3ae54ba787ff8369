"""Embedding, indexing, losses, optimisers, copies, convolutions and recurrent networks."""

import pytest
import torch

from vramfit.virtual.kernels import METAS, Extras, covered, extras
from vramfit.virtual.kernels.context import given_back
from vramfit.virtual.kernels.copying import copy_temporaries
from vramfit.virtual.kernels.cub import sort_bytes
from vramfit.virtual.kernels.rnn import reserve_bytes

from .support import FAKE, ask, aten, context, cuda


def embedding(tokens, weights=50_257, width=768, dtype=torch.float32, ctx=None):
    grad, indices = cuda(tokens, width, dtype=dtype), cuda(tokens, dtype=torch.int64)
    return ask(aten.embedding_dense_backward.default, grad, indices, weights, -1, False, ctx=ctx)


def test_embedding_backward_of_few_tokens_needs_nothing():
    assert embedding(3072) is None
    assert embedding(3073) is not None


def test_embedding_backward_sorts_and_sums_segments():
    # 4096 tokens of 768 on an A100: at most 4096 segments and 4096 / 10 + 4096 = 4505 parts of ten rows.
    # 4096 x 768 / 768 = 4096 blocks >= 108 x 4, so the parts are summed in two steps: a row of floats a part.
    ids = 4096 * 8
    found = embedding(4096)
    assert found is not None
    assert found.before == (ids, ids)
    assert found.after == (ids, 8, ids, ids, 8, 4505 * 8, 4505 * 768 * 4)


def test_embedding_backward_of_a_small_table_sums_atomically():
    # 100,000 tokens of 128 into 64 rows: 64 blocks < 432, and 10,064 parts > 4 x 64. Float32 sums in place,
    # halves into a float32 table.
    single = embedding(100_000, weights=64, width=128)
    half = embedding(100_000, weights=64, width=128, dtype=torch.bfloat16)
    assert single is not None and half is not None
    assert single.before == half.before
    assert sum(half.after) >= sum(single.after)
    deterministic = embedding(100_000, weights=64, width=128, ctx=context(deterministic=True))
    assert deterministic is not None
    assert deterministic.after[-1] == 10_064 * 128 * 4


def test_accumulating_writes_sort_their_positions():
    table, ids, values = cuda(1000, 64), cuda(5000, dtype=torch.int64), cuda(5000, 64)
    args = (table, [ids], values, True)
    found = extras(aten._index_put_impl_.default, args, {}, table, context())
    flat = 5000 * 8
    assert found is not None
    # The index wrapped into range, times its stride (the first is given back); then what the sort needs.
    sort = sort_bytes(5000, 8, 8, context(), bits=10)
    assert found.after == (flat, flat, given_back(1), flat, flat, flat, sort)
    assert extras(aten._index_put_impl_.default, (*args[:3], False), {}, table, context()) is None


def test_flat_positions_are_summed_up_one_index_after_the_other():
    # As recorded of logits[rows, targets] with rows on the host: its product comes over, that of the targets is
    # made on the card, added and given back.
    logits, rows, targets = cuda(512, 10_000), torch.arange(512), cuda(512, dtype=torch.int64)
    args = (logits, [rows, targets], cuda(512), True)
    found = extras(aten._index_put_impl_.default, args, {}, logits, context())
    flat = 512 * 8
    assert found is not None
    assert found.after[:8] == (flat, flat, flat, given_back(2), given_back(3), flat, flat, flat)


def test_a_broadcast_value_is_expanded_before_it_is_written():
    table, ids = cuda(1000, 64), cuda(5000, dtype=torch.int64)
    found = extras(aten.index_put_.default, (table, [ids], cuda(1), True), {}, table, context())
    assert found is not None
    assert found.after[3] == 5000 * 64 * 4


def test_index_add_sorts_only_when_it_must_be_deterministic():
    args = (cuda(1000, 64), 0, cuda(5000, dtype=torch.int64), cuda(5000, 64))
    assert extras(aten.index_add.default, args, {}, args[0], context()) is None
    assert extras(aten.index_add.default, args, {}, args[0], context(deterministic=True)) is not None


def test_softmax_backward_multiplies_beside_its_result():
    scores = cuda(8, 16, 128)
    found = ask(aten._softmax_backward_data.default, scores, scores, -1, torch.float32)
    assert found == Extras(after=(8 * 16 * 128 * 4,))
    assert ask(aten._log_softmax_backward_data.default, scores, scores, -1, torch.float32) is None


def test_mean_squared_error_keeps_the_unreduced_loss_for_a_moment():
    prediction = cuda(32, 100)
    assert ask(aten.mse_loss.default, prediction, prediction) == Extras(after=(12_800,))
    assert ask(aten.mse_loss.default, prediction, prediction, 0) is None
    assert ask(aten.huber_loss.default, prediction, prediction) == Extras(before=(12_800,))


def test_foreach_norm_keeps_a_row_of_partial_norms_for_each_tensor():
    # Three tensors, the largest of 200,000 elements = 4 chunks of 65,536: 3 x 4 floats
    tensors = [cuda(10), cuda(200_000), cuda(70_000)]
    assert ask(aten._foreach_norm.Scalar, tensors) == Extras(before=(48,))
    halves = [cuda(10, dtype=torch.bfloat16)]
    assert ask(aten._foreach_norm.Scalar, halves) == Extras(before=(4,))


def test_fused_and_foreach_steps_allocate_nothing():
    assert not any("_fused_adam" in name or "_foreach_add" in name for name in covered())


@pytest.mark.parametrize(
    ("source", "non_blocking", "expected"),
    [
        ("dense", False, ()),
        ("strided", False, (64 * 32 * 4,)),
        ("dense", True, ()),
    ],
)
def test_copies_to_the_host(source, non_blocking, expected):
    with FAKE:
        host = torch.empty(64, 32)
        tensor = cuda(64, 32) if source == "dense" else cuda(32, 64).t()
    assert copy_temporaries(tensor, host, non_blocking) == expected


def test_converting_copies():
    with FAKE:
        host, half_host = torch.empty(64, 32), torch.empty(64, 32, dtype=torch.float16)
        strided = cuda(32, 64).t()
    half = cuda(64, 32, dtype=torch.float16)
    assert copy_temporaries(half, host, False) == ()  # moved as halves, converted on the host
    assert copy_temporaries(half, host, True) == (64 * 32 * 4,)  # converted on the card
    assert copy_temporaries(half_host, cuda(64, 32), True) == ()  # converted on the host
    assert copy_temporaries(half_host, strided, False) == (64 * 32 * 4,)  # a dense target stands in
    assert copy_temporaries(half, cuda(64, 32), False) == ()  # on one device a kernel does it all


def lstm(train, bidirectional=False):
    """Arguments of ``_cudnn_rnn``: 10 steps, batch 4, input 16, hidden 8, two layers."""
    weights, states = [cuda(32, 16)], cuda(2, 4, 8)
    return (
        cuda(10, 4, 16),
        weights,
        4,
        cuda(2000),
        states,
        states,
        2,
        8,
        0,
        2,
        False,
        0.0,
        train,
        bidirectional,
        [],
        None,
    )


def test_recurrent_passes_hold_the_gates_of_a_layer():
    gates = 10 * 4 * 8 * 4 * 4  # rows x hidden x four gates x 4 bytes
    inference = extras(aten._cudnn_rnn.default, lstm(False), {}, None, context())
    assert inference == Extras(after=(gates,), error_bytes=gates)
    both_ways = extras(aten._cudnn_rnn.default, lstm(True, True), {}, None, context())
    assert both_ways is not None
    assert both_ways.after == (2 * gates,)
    assert both_ways.error_bytes > 2 * gates


def test_recurrent_reserve_holds_gates_and_states():
    # Four gates, cell and hidden state, for every step and layer
    expected = 10 * 4 * 8 * 2 * 6 * 4
    assert reserve_bytes(2, 10, 4, 8, 2, 1, 4) == expected
    op = aten._cudnn_rnn.default
    assert METAS[op](FAKE, *lstm(True))[3].shape == (expected,)
    assert METAS[op](FAKE, *lstm(False))[3].shape == (0,)


def test_every_rule_belongs_to_an_op_of_this_torch():
    names = covered()
    assert {"aten.mm.default", "aten.sort.default", "aten.convolution.default", "aten.copy_.default"} <= names
    assert len(names) > 90


def test_a_boolean_index_turns_into_positions():
    values, mask = cuda(100, 64), cuda(100, dtype=torch.bool)
    found = extras(aten.index.Tensor, (values, [mask]), {}, cuda(30, 64), context())
    assert found == Extras(before=(30 * 8,))
    assert (
        extras(aten.index.Tensor, (values, [cuda(30, dtype=torch.int64)]), {}, cuda(30, 64), context())
        is None
    )


def test_masked_scatter_counts_along_the_mask():
    values, mask = cuda(100, 64), cuda(100, 64, dtype=torch.bool)
    found = extras(aten.masked_scatter.default, (values, mask, values), {}, values, context())
    assert found is not None
    assert found.after[0] == 100 * 64 * 8


def test_recurrent_backward_reads_its_own_arguments():
    source, *_ = lstm(True)
    states = cuda(2, 4, 8)
    head = (source, [cuda(32, 16)], 4, cuda(2000), states, states, cuda(10, 4, 8), None, None, None)
    args = (*head, 2, 8, 0, 2, False, 0.0, True, False, [], None, cuda(0), [True] * 4)
    found = extras(aten._cudnn_rnn_backward.default, args, {}, None, context())
    assert found is not None
    assert found.after == (10 * 4 * 8 * 4 * 4,)
