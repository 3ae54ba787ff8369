import torch

from vramfit.virtual.kernels import METAS, Extras
from vramfit.virtual.kernels.norm import channels_last_grid, partial_rows

from .support import FAKE, ask, aten, context, cuda, extras


def layer_norm_backward(rows, width, ctx):
    source, row = cuda(rows, width), cuda(width)
    stats = cuda(rows, 1)
    args = (source, source, [width], stats, stats, row, row, [True, True, True])
    return extras(aten.native_layer_norm_backward.default, args, {}, (source, row, row), ctx)


def test_layer_norm_of_a_strided_input_copies_it():
    with FAKE:
        strided = cuda(64, 8, 32).transpose(0, 1)
    row = cuda(32)
    found = ask(aten.native_layer_norm.default, strided, [32], row, row, 1e-5)
    assert found == Extras(before=(64 * 8 * 32 * 4,))
    assert ask(aten.native_layer_norm.default, cuda(8, 32), [32], row, row, 1e-5) is None


def test_layer_norm_backward_of_usual_shapes_needs_nothing():
    assert layer_norm_backward(4096, 768, context()) is None
    assert layer_norm_backward(65_536, 768, context()) is None  # not above 64 Ki rows


def test_layer_norm_backward_copies_a_strided_gradient_after_its_results():
    with FAKE:
        grad = cuda(64, 8, 32).transpose(0, 1)
    source, row, stats = cuda(8, 64, 32), cuda(32), cuda(8, 64, 1)
    args = (grad, source, [32], stats, stats, row, row, [True, True, True])
    found = extras(aten.native_layer_norm_backward.default, args, {}, (source, row, row), context())
    assert found == Extras(after=(64 * 8 * 32 * 4,))


def test_layer_norm_backward_of_tall_inputs_sums_blocks_of_rows():
    # 131,072 rows of 768 on an A100: 24 columns of blocks < 108 / 2; 131,072 / 32 = 4096 blocks of rows, but
    # at most 32,768 / 24 = 1365. Two partial tables, then a new row for each sum.
    assert partial_rows(131_072, 768, 108) == 1365
    table, row = 1365 * 768 * 4, 768 * 4
    assert layer_norm_backward(131_072, 768, context()) == Extras(after=(table, table, row, row))


def test_wide_rows_are_never_split():
    # 2048 / 32 = 64 columns of blocks >= 108 / 2 on an A100, but < 142 / 2 on an RTX 6000 Ada
    assert partial_rows(131_072, 2048, 108) == 0
    assert partial_rows(131_072, 2048, 142) == 512


def test_rms_norm_backward_has_one_parameter():
    source, row = cuda(131_072, 768), cuda(768)
    args = (source, source, [768], cuda(131_072, 1), row, [True, True])
    found = extras(aten._fused_rms_norm_backward.default, args, {}, (source, row), context())
    assert found == Extras(after=(1365 * 768 * 4, 768 * 4))


def test_group_norm_keeps_a_scale_and_a_shift_per_channel():
    source, channel = cuda(4, 64, 16, 16, dtype=torch.float16), cuda(64, dtype=torch.float16)
    found = ask(aten.native_group_norm.default, source, channel, channel, 4, 64, 256, 32, 1e-5)
    assert found == Extras(after=(4 * 64 * 4, 4 * 64 * 4))


def test_group_norm_backward_keeps_sums_and_coefficients():
    source, channel, stats = cuda(4, 64, 16, 16), cuda(64), cuda(4, 32)
    args = (source, source, stats, stats, channel, 4, 64, 256, 32, [True, True, True])
    found = extras(aten.native_group_norm_backward.default, args, {}, (source, channel, channel), context())
    channels, groups = 4 * 64 * 4, 4 * 32 * 4
    assert found == Extras(after=(channels, channels, groups, groups, channels))


def test_channels_last_batch_norm_stages_sums_of_blocks():
    # 32 x 56 x 56 = 100,352 rows of 64 channels: 32 x 16 threads, 16 rows each: 392 blocks, at most 128.
    # Staging: four values of 4 bytes, a channel and block; counters: 64 / 32 columns of 4 bytes.
    assert channels_last_grid(100_352, 64) == 128
    with FAKE:
        source = cuda(32, 56, 56, 64).permute(0, 3, 1, 2)
    channel = cuda(64)
    args = (source, channel, channel, channel, channel, True, 0.1, 1e-5)
    found = extras(aten.native_batch_norm.default, args, {}, None, context())
    assert found == Extras(after=(4 * 64 * 128 * 4, 8))
    dense = (cuda(32, 64, 56, 56), *args[1:])
    assert extras(aten.native_batch_norm.default, dense, {}, None, context()) is None


def test_rows_of_channels_are_channels_last():
    # BatchNorm1d of 100,352 rows of 64: strides (64, 1), the same launch as above
    source, channel = cuda(100_352, 64), cuda(64)
    args = (source, channel, channel, channel, channel, True, 0.1, 1e-5)
    found = extras(aten.native_batch_norm.default, args, {}, None, context())
    assert found == Extras(after=(4 * 64 * 128 * 4, 8))
    sums = 64 * 4
    args = (source, source, channel, channel, channel, channel, channel, True, 1e-5, [True] * 3)
    found = extras(aten.native_batch_norm_backward.default, args, {}, None, context())
    assert found == Extras(after=(sums, sums, 2 * 64 * 128 * 4, 8))


def test_a_gradient_of_another_layout_makes_both_dense():
    with FAKE:
        source = cuda(32, 56, 56, 64).permute(0, 3, 1, 2)
    grad, channel = cuda(32, 64, 56, 56), cuda(64)
    args = (grad, source, channel, channel, channel, channel, channel, True, 1e-5, [True] * 3)
    found = extras(aten.native_batch_norm_backward.default, args, {}, None, context())
    assert found == Extras(before=(32 * 64 * 56 * 56 * 4,), after=(64 * 4, 64 * 4))


def test_synchronised_batch_norm_has_its_parts():
    with FAKE:
        source = cuda(32, 56, 56, 64, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    mean, deviation = METAS[aten.batch_norm_stats.default](FAKE, source, 1e-5)
    assert mean.shape == deviation.shape == (64,)
    assert mean.dtype is torch.float32
    found = extras(aten.batch_norm_stats.default, (source, 1e-5), {}, None, context())
    assert found == Extras(after=(4 * 64 * 128 * 4, 8))
    out = METAS[aten.batch_norm_elemt.default](FAKE, source, None, None, mean, deviation, 1e-5)
    assert (out.shape, out.stride()) == (source.shape, source.stride())
    sums = METAS[aten.batch_norm_backward_reduce.default](
        FAKE, out, source, mean, deviation, mean, True, True, False
    )
    assert [None if tensor is None else tensor.shape for tensor in sums] == [(64,), (64,), (64,), None]


def test_cudnn_batch_norm_is_sure_of_contiguous_data_only():
    op = aten.cudnn_batch_norm.default
    channel = cuda(64)
    rest = (channel, channel, channel, channel, True, 0.1, 1e-5)
    assert extras(op, (cuda(8, 64, 32, 32), *rest), {}, None, context()) is None
    with FAKE:
        source = cuda(8, 32, 32, 64).permute(0, 3, 1, 2)
    assert extras(op, (source, *rest), {}, None, context()) == Extras(error_bytes=64 * 8 * 512)
