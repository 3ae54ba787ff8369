"""cuDNN's recurrent networks: what they copy, keep and hold for a pass."""

import pytest
import torch

from vramfit.virtual.kernels import METAS, Extras
from vramfit.virtual.kernels.rnn import reserve_bytes

from .support import FAKE, aten, context, cuda, extras

GATES = 10 * 4 * 8 * 4 * 4  # rows x hidden x four gates x 4 bytes


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


def backward(head, grads, batch_first=False, reserve=0):
    """Arguments of ``_cudnn_rnn_backward``: input, states, output and their gradients, then the settings."""
    source, states, output = head
    geometry = (2, 8, 0, 2, batch_first, 0.0, True, False, [], None, cuda(reserve), [True] * 4)
    return (source, [cuda(32, 16)], 4, cuda(2000), states, states, output, *grads, *geometry)


PLANE = 10 * 4 * 8 * 4  # rows x hidden x 4 bytes
TRAINING = 12 * PLANE + 4 * 8 * 4 * 4 * 5 + 512  # and five states of one step for each gate


def test_passes_without_training_hold_the_gates_of_a_layer():
    inference = extras(aten._cudnn_rnn.default, lstm(False), {}, None, context())
    assert inference == Extras(after=(GATES,), error_bytes=GATES, error_below_bytes=GATES)


def test_training_holds_more_and_doubts_what_it_keeps():
    found = extras(aten._cudnn_rnn.default, lstm(True), {}, None, context())
    kept = reserve_bytes(2, 10, 4, 8, 2, 1, 4) // 10
    doubt = TRAINING // 3
    assert found == Extras(
        before=(TRAINING,), error_bytes=doubt, error_below_bytes=doubt, kept_errors=((3, kept, kept),)
    )
    both_ways = extras(aten._cudnn_rnn.default, lstm(True, True), {}, None, context())
    assert both_ways is not None
    assert both_ways.before == (28 * PLANE + 4 * 8 * 4 * 4 * 44 + 512,)


@pytest.mark.parametrize(
    ("call", "workspace", "reserve"),
    [
        # mode, layers, directions, element: batch 32, 128 steps, 1,024 units
        ((2, 2, 1, torch.float32), 203_948_544, 185_073_920),
        ((3, 3, 1, torch.float32), 203_293_184, 336_593_152),
        ((2, 2, 2, torch.float16), 246_415_872, 186_646_784),
    ],
    ids=["lstm", "gru", "lstm both ways"],
)
def test_sizes_are_those_of_recordings(call, workspace, reserve):
    """What the recordings lstm-fp32-sgd, gru-fp32 and lstm-bidirectional-bf16 of an H100 have, below benchmarks."""
    mode, layers, directions, dtype = call
    states = cuda(layers * directions, 32, 1024, dtype=dtype)
    args = (
        cuda(128, 32, 1024, dtype=dtype),
        [cuda(32, 16, dtype=dtype)],
        4,
        cuda(2000, dtype=dtype),
        states,
        states if mode == 2 else None,
        mode,
        1024,
        0,
        layers,
        False,
        0.2,
        True,
        directions == 2,
        [],
        None,
    )
    found = extras(aten._cudnn_rnn.default, args, {}, None, context())
    assert found is not None
    assert found.before == (workspace,)
    assert METAS[aten._cudnn_rnn.default](FAKE, *args)[3].shape == (reserve,)


def test_a_sequence_that_lies_batch_first_is_copied():
    args = list(lstm(False))
    args[0], args[10] = cuda(4, 10, 16), True
    found = extras(aten._cudnn_rnn.default, tuple(args), {}, None, context())
    assert found is not None
    assert found.before == (4 * 10 * 16 * 4,)


def test_the_reserve_holds_gates_and_states():
    # Four gates and the cell of each layer, and what the first hands to the second, for every step
    expected = 10 * 4 * 8 * (2 * 5 + 1) * 4 + 256
    assert reserve_bytes(2, 10, 4, 8, 2, 1, 4) == expected
    op = aten._cudnn_rnn.default
    assert METAS[op](FAKE, *lstm(True))[3].shape == (expected,)
    assert METAS[op](FAKE, *lstm(False))[3].shape == (0,)


def test_weights_apart_are_copied_into_one_buffer():
    args = list(lstm(True))
    args[3] = None
    results = METAS[aten._cudnn_rnn.default](FAKE, *args)
    assert results[4].shape == (sum(weight.numel() for weight in args[1]),)


def test_backward_runs_two_passes():
    source, states, output = cuda(10, 4, 16), cuda(2, 4, 8), cuda(10, 4, 8)
    args = backward((source, states, output), (output, states, states), reserve=300)
    found = extras(aten._cudnn_rnn_backward.default, args, {}, None, context())
    doubt = TRAINING // 3
    assert found == Extras(
        between=((), (), (TRAINING,), (TRAINING,)), error_bytes=doubt, error_below_bytes=doubt
    )


def test_backward_makes_zeros_and_copies():
    source, states, output = cuda(4, 10, 16), cuda(2, 4, 8), cuda(4, 10, 8)
    args = backward((source, states, output), (output, None, None), batch_first=True)
    found = extras(aten._cudnn_rnn_backward.default, args, {}, None, context())
    assert found is not None
    assert found.before == (2 * 4 * 8 * 4, 2 * 4 * 8 * 4)
    copies = 4 * 10 * 16 * 4, 4 * 10 * 8 * 4
    assert found.between == ((), (), (*copies, TRAINING), (copies[0], TRAINING))
