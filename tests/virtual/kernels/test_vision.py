"""Dense stand-ins of interpolation, pooling and rolling; buffers of distances' gradients; losses."""

import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.reduction import reduce_dense

from .support import FAKE, ask, aten, context, cuda, extras


def channels_last(*shape):
    with FAKE:
        return cuda(*shape).to(memory_format=torch.channels_last)


def test_nearest_neighbours_have_a_kernel_for_many_channels_last():
    args = ([16, 16], None)
    assert ask(aten.upsample_nearest2d.vec, cuda(2, 3, 8, 8), *args) is None
    for channels, expected in ((4, None), (3, Extras(after=(2 * 3 * 64 * 4, 2 * 3 * 256 * 4)))):
        source = channels_last(2, channels, 8, 8)
        found = ask(aten.upsample_nearest2d.default, source, [16, 16])
        assert found == expected


def test_pooling_reads_either_memory_format_and_copies_others():
    args = ([2, 2],)
    assert ask(aten.max_pool2d_with_indices.default, cuda(2, 8, 16, 16), *args) is None
    assert ask(aten.max_pool2d_with_indices.default, channels_last(2, 8, 16, 16), *args) is None
    with FAKE:
        strided = cuda(2, 8, 16, 32)[..., ::2]
    found = ask(aten.max_pool2d_with_indices.default, strided, *args)
    assert found == Extras(after=(2 * 8 * 256 * 4,))


def test_gradients_of_pooling_are_brought_to_the_format_of_the_input():
    grad, source = cuda(2, 8, 8, 8), channels_last(2, 8, 16, 16)
    found = extras(
        aten.avg_pool2d_backward.default,
        (grad, source, [2, 2], [2, 2], [0, 0], False, True, None),
        {},
        source,
        context(),
    )
    assert found == Extras(after=(2 * 8 * 64 * 4,))


def test_rolling_two_dimensions_keeps_what_was_rolled_first():
    source = cuda(8, 56, 56, 96)
    assert ask(aten.roll.default, source, [3, 3], [1, 2]) == Extras(before=(8 * 56 * 56 * 96 * 4,))
    assert ask(aten.roll.default, source, [3], [1]) is None


def test_gradients_of_distances_hold_every_pair():
    # 100 rows against 50, of 30 numbers
    first, second, grad = cuda(100, 30), cuda(50, 30), cuda(100, 50)
    args = (grad, first, second, 1.0, grad)
    found = extras(aten._cdist_backward.default, args, {}, first, context())
    assert found == Extras(after=(50 * 100 * 30 * 4,))
    pairs = extras(aten._pdist_backward.default, (cuda(4950), first, 2.0, cuda(4950)), {}, first, context())
    assert pairs == Extras(after=(99 * 100 * 30 * 4,))


def test_reduced_losses_keep_partial_results_too():
    prediction = cuda(1000, 1000)
    partial = reduce_dense(1_000_000, torch.float32, context())
    assert partial is not None
    assert ask(aten.mse_loss.default, prediction, prediction) == Extras(after=(4_000_000, *partial.after))
    assert ask(aten.huber_loss.default, prediction, prediction) == Extras((4_000_000,), partial.after)


def test_unreduced_losses_of_classes_read_any_strides():
    with FAKE:
        log_probabilities = cuda(100, 32).t()
    target, weight = cuda(32, dtype=torch.int64), None
    args = (log_probabilities, target, weight)
    assert ask(aten.nll_loss_forward.default, *args, 1, -100) == Extras(after=(12_800,))
    assert ask(aten.nll_loss_forward.default, *args, 0, -100) is None


def test_temporal_classification_keeps_log_betas_and_lengths():
    log_probs, targets = cuda(50, 4, 20), cuda(4, 10, dtype=torch.int64)
    lengths, sizes = [50] * 4, [10] * 4
    alphas = cuda(4, 50, 21)
    forward = extras(
        aten._ctc_loss.default, (log_probs, targets, lengths, sizes), {}, (cuda(4), alphas), context()
    )
    assert forward == Extras(after=(32, 32, 32))
    args = (cuda(4), log_probs, targets, lengths, sizes, cuda(4), alphas, 0, False)
    backward = extras(aten._ctc_loss_backward.default, args, {}, log_probs, context())
    assert backward == Extras(before=(4 * 50 * 21 * 4,), after=(32, 32, 32))
    library = (log_probs, targets, lengths, sizes, 0, False, False)
    found = extras(aten._cudnn_ctc_loss.default, library, {}, (cuda(4), log_probs), context())
    assert found is not None
    assert found.after == (2 * 50 * 4 * 21 * 4,)
    assert found.error_below_bytes == found.after[0] < found.error_bytes
