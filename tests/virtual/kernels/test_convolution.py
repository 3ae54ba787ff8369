"""Which kernels compute a convolution, in which order they allocate, and how wide estimates are."""

import math

import pytest
import torch

from vramfit.virtual.kernels import Blas, Extras
from vramfit.virtual.kernels.conv_workspace import uses_tensor_cores
from vramfit.virtual.kernels.convolution import ConvBackend, Convolution, conv_layout
from vramfit.virtual.kernels.rules import given_back
from vramfit.virtual.op_call import EMPTY_CACHE, Spare

from .support import FAKE, ask, aten, blas_libraries, context, cuda, extras

HALF = torch.float16


def channels_last(*shape, dtype=torch.float32):
    with FAKE:
        return cuda(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def conv(source, weight, ctx=None, *, stride=1, padding=1, dilation=1, transposed=False, groups=1, bias=None):
    rank = source.dim() - 2
    geometry = ([stride] * rank, [padding] * rank, [dilation] * rank, transposed, [0] * rank, groups)
    found = ask(aten.convolution.default, source, weight, bias, *geometry, ctx=ctx)
    assert found is not None
    return found


def backward(grad, source, weight, mask, ctx=None, *, stride=1, padding=1, groups=1, transposed=False):
    rank = source.dim() - 2
    geometry = ([stride] * rank, [padding] * rank, [1] * rank, transposed, [0] * rank, groups)
    bias = [grad.shape[1]]
    found = ask(aten.convolution_backward.default, grad, source, weight, bias, *geometry, mask, ctx=ctx)
    assert found is not None
    return found


def who(source, weight, ctx=None, **changes):
    settings = {
        "stride": (1, 1),
        "padding": (0, 0),
        "dilation": (1, 1),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": 1,
        **changes,
    }
    return Convolution(source=source, weight=weight, **settings).backend(ctx or context())


# -- which kernel (_select_conv_backend)


def test_depthwise_convolutions_of_contiguous_tensors_are_torchs_own():
    depthwise = cuda(8, 64, 32, 32), cuda(64, 1, 3, 3)
    assert who(*depthwise, groups=64) is ConvBackend.DEPTHWISE
    assert who(channels_last(8, 64, 32, 32), depthwise[1], groups=64) is ConvBackend.CUDNN
    assert who(cuda(8, 64, 32, 32), cuda(64, 2, 3, 3), groups=32) is ConvBackend.CUDNN


def test_what_cudnn_does_not_take_is_unfolded_into_columns():
    source, weight = cuda(8, 64, 32, 32), cuda(64, 64, 3, 3)
    assert who(source, weight) is ConvBackend.CUDNN
    assert who(source, weight, context(cudnn_enabled=False)) is ConvBackend.COLUMNS
    assert who(source, weight, transposed=True, output_padding=(1, 1)) is ConvBackend.COLUMNS_TRANSPOSED
    dilated = context(cudnn_deterministic=True)
    assert who(source, weight, dilated, dilation=(2, 2)) is ConvBackend.COLUMNS
    assert who(channels_last(8, 64, 32, 32), weight, dilated, dilation=(2, 2)) is ConvBackend.CUDNN


def test_bfloat16_needs_capability_8():
    tensors = cuda(8, 64, 32, 32, dtype=torch.bfloat16), cuda(64, 64, 3, 3, dtype=torch.bfloat16)
    assert who(*tensors) is ConvBackend.CUDNN
    assert who(*tensors, context("T4")) is ConvBackend.COLUMNS


def test_the_layout_is_channels_last_if_either_tensor_is():
    dense, last = cuda(8, 64, 32, 32), channels_last(8, 64, 32, 32)
    weight, last_weight = cuda(64, 64, 3, 3), channels_last(64, 64, 3, 3)
    assert conv_layout(dense, weight) is torch.contiguous_format
    assert conv_layout(last, weight) is conv_layout(dense, last_weight) is torch.channels_last
    double = channels_last(8, 64, 32, 32, dtype=torch.float64)
    assert conv_layout(double, double) is torch.contiguous_format


# -- torch's own kernels: exact


def test_columns_of_one_image():
    # ConvolutionMM2d.cu, slow_conv2d_forward: C x kH x kW rows of 30 x 30 pixels
    off = context(cudnn_enabled=False)
    found = conv(cuda(8, 64, 32, 32), cuda(128, 64, 3, 3), off, padding=0)
    assert found == Extras(after=(64 * 9 * 30 * 30 * 4,))
    pointwise = ask(
        *(aten.convolution.default, cuda(8, 64, 32, 32), cuda(128, 64, 1, 1), None),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ctx=off,
    )
    assert pointwise == Extras()  # a plain product


def test_columns_of_groups_are_concatenated():
    found = conv(cuda(8, 64, 32, 32), cuda(128, 16, 3, 3), context(cudnn_enabled=False), groups=4)
    assert found == Extras(before=(8 * 128 * 32 * 32 * 4,), after=(16 * 9 * 32 * 32 * 4,))


def test_transposed_columns_lie_over_the_input_and_a_bias_needs_ones():
    # NaiveConvolutionTranspose2d.cu: output channels x kernel rows of input pixels; ones as wide as the output
    off = context(cudnn_enabled=False)
    found = conv(cuda(8, 64, 32, 32), cuda(64, 32, 3, 3), off, transposed=True, bias=cuda(32), padding=0)
    assert found == Extras(after=(32 * 9 * 32 * 32 * 4, 34 * 34 * 4))


def test_three_dimensions_without_cudnn():
    found = conv(cuda(2, 8, 16, 16, 16), cuda(4, 8, 3, 3, 3), context(cudnn_enabled=False))
    assert found == Extras(after=(8 * 27 * 16 * 16 * 16 * 4,))


def test_columns_are_multiplied_by_cublas():
    args = (cuda(8, 64, 32, 32), cuda(128, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert blas_libraries(aten.convolution.default, args, {}, context()) == ()
    off = context(cudnn_enabled=False)
    assert blas_libraries(aten.convolution.default, args, {}, off) == (Blas.CUBLAS,)
    backward_args = (cuda(8, 128, 32, 32), *args[:2], [128], *args[3:], [True] * 3)
    assert blas_libraries(aten.convolution_backward.default, backward_args, {}, off) == (Blas.CUBLAS,)


def test_depthwise_kernels_allocate_nothing():
    source, weight = cuda(8, 64, 32, 32), cuda(64, 1, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    assert ask(aten.convolution.default, source, weight, None, *geometry) is None
    with FAKE:
        strided = cuda(8, 64, 32, 64)[..., ::2]
    found = ask(aten.convolution.default, strided, weight, None, *geometry)
    assert found == Extras(before=(8 * 64 * 32 * 32 * 4,))


def test_depthwise_gradients_are_both_made_before_what_they_need_is_copied():
    source, weight = cuda(8, 64, 32, 32), cuda(64, 1, 3, 3)
    grad, copy = channels_last(8, 64, 32, 32), 8 * 64 * 32 * 32 * 4
    assert backward(grad, source, weight, [True, True, False], groups=64).between == ((), (copy,), ())
    assert backward(grad, source, weight, [True, False, False], groups=64).between == ((copy,), (), ())


def test_gradients_of_columns_come_one_after_the_other():
    off = context(cudnn_enabled=False)
    grad, source, weight = cuda(8, 128, 32, 32), cuda(8, 64, 32, 32), cuda(128, 64, 3, 3)
    columns = 64 * 9 * 32 * 32 * 4
    found = backward(grad, source, weight, [True, True, False], off)
    assert found == Extras(between=((columns,), (columns,), ()))


# -- cuDNN


@pytest.mark.parametrize(
    ("made", "read", "recorded"), [(16, 30, 82_880), (32, 16, 51_328), (64, 32, 205_056)]
)
def test_the_recorded_workspaces_forward(made, read, recorded):
    # Recording eor-nn: float32 on a card of capability 7.5, filters of 3 x 3. 36 bytes a filter, 64 bytes for a tile
    # of the transform, made channels to 32 and read ones to 8: 32 x 32 x 64 + 16 x 30 x 36 + 4 x 16 = 82,880.
    found = conv(cuda(16, read, 32, 32), cuda(made, read, 3, 3), context("T4"))
    assert found.after == (recorded,)


@pytest.mark.parametrize(
    ("made", "read", "recorded"), [(32, 64, 204_928), (16, 32, 84_032), (30, 16, 50_168)]
)
def test_the_recorded_workspaces_of_gradients(made, read, recorded):
    # The gradient of the input makes the channels that the filters read
    source, weight = cuda(16, made, 32, 32), cuda(read, made, 3, 3)
    found = backward(cuda(16, read, 32, 32), source, weight, [True, False, False], context("T4"))
    assert found.between == ((recorded,), (), ())


PIXELS = 8 * 32 * 32 * 4
"""Bytes of one channel of the images below."""


@pytest.mark.parametrize(
    ("filters", "changes", "told", "most"),
    [
        pytest.param((128, 64, 3, 3), {}, 0, 64 * PIXELS + 128 * 64 * 9 * 4, id="3x3"),
        pytest.param(
            (128, 64, 1, 1),
            {"padding": 0},
            64 * PIXELS + 128 * 64 * 4,
            192 * PIXELS + 128 * 64 * 4,
            id="1x1",
        ),
        pytest.param(
            (128, 16, 3, 3),
            {"groups": 4},
            64 * PIXELS + 128 * 16 * 9 * 4,
            192 * PIXELS + 128 * 16 * 9 * 4,
            id="groups",
        ),
        pytest.param(
            (128, 64, 3, 3),
            {"stride": 2},
            96 * PIXELS + 128 * 64 * 9 * 4,
            96 * PIXELS + 128 * 64 * 9 * 4,
            id="strided",
        ),
        pytest.param(
            (128, 64, 3, 3),
            {"dilation": 2, "padding": 2},
            *[192 * PIXELS + 128 * 64 * 9 * 4] * 2,
            id="dilated",
        ),
    ],
)
def test_what_contiguous_data_of_tensor_cores_take_forward(filters, changes, told, most):
    found = conv(cuda(8, 64, 32, 32), cuda(*filters), **changes)
    assert found.after == ((told,) if told else ())
    assert all(type(size) is Spare for size in found.after)  # where it does not fit, another engine does
    assert (found.error_bytes, found.error_below_bytes) == (most - told, told)


def test_engines_without_tensor_cores_and_half_precision_keep_their_rules():
    plain = conv(cuda(8, 64, 32, 32), cuda(128, 64, 3, 3), context(cudnn_tf32=False))
    assert plain.after == (128 * 64 * (9 + 16) * 4 + 4 * 128,)
    half = conv(cuda(8, 64, 32, 32, dtype=HALF), cuda(128, 64, 3, 3, dtype=HALF))
    whole = 192 * PIXELS // 2 + 128 * 64 * 9 * 2
    assert half.after == (whole,)
    assert (half.error_bytes, half.error_below_bytes) == (whole, whole)


@pytest.mark.parametrize(
    ("batch", "made", "read", "side", "size"),
    [
        (16, 512, 512, 7, 47_185_920),  # resnet18-fp32
        (16, 256, 256, 14, 28_311_552),
        (16, 128, 128, 28, 31_260_672),
        (16, 64, 64, 56, 58_392_576),
        (4, 3, 128, 64, 19_372_032),  # diffusion-unet-fp32
        (4, 128, 128, 64, 40_108_032),
        (4, 128, 256, 64, 61_341_696),
        (4, 128, 512, 32, 33_030_144),
        (4, 256, 512, 16, 25_952_256),
        (4, 256, 1024, 8, 40_697_856),
    ],
)
def test_gradients_of_filters_without_tensor_cores_as_recorded(batch, made, read, side, size):
    ctx = context("H100 SXM", cudnn_tf32=False)
    grad, source, filters = (
        cuda(batch, made, side, side),
        cuda(batch, read, side, side),
        cuda(made, read, 3, 3),
    )
    found = backward(grad, source, filters, [False, True, False], ctx)
    assert found.between[1] == (size,)
    assert conv(source, filters, ctx).after == ()


@pytest.mark.parametrize(
    ("shape", "filters", "size"),
    [
        ((1, 64, 48, 48, 48), (64, 32, 2, 2, 2), 141_623_312),  # unet3d-fp32
        ((128, 512, 4, 4), (512, 256, 4, 4), 20_971_536),  # dcgan-fp32
    ],
)
def test_transposed_convolutions_without_tensor_cores_as_recorded(shape, filters, size):
    ctx, padding = context("H100 SXM", cudnn_tf32=False), (filters[2] - 2) // 2
    found = conv(cuda(*shape), cuda(*filters), ctx, stride=2, padding=padding, transposed=True)
    assert found.after == (size,)


@pytest.mark.parametrize(
    ("batch", "width", "size"), [(64, 768, 73_793_552), (32, 768, 38_469_648), (64, 1024, 81_264_656)]
)
def test_patches_of_vision_transformers_as_recorded(batch, width, size):
    image, filters = cuda(batch, 3, 224, 224, dtype=HALF), cuda(width, 3, 16, 16, dtype=HALF)
    found = conv(image, filters, context("H100 SXM"), stride=16, padding=0)
    assert found.after == (size,)
    assert found.error_below_bytes == size


@pytest.mark.parametrize(("batch", "size"), [(64, 92_668_048), (32, 57_344_144)])
def test_gradients_of_patches_as_recorded(batch, size):
    grad, image = cuda(batch, 768, 14, 14, dtype=HALF), cuda(batch, 3, 224, 224, dtype=HALF)
    filters = cuda(768, 3, 16, 16, dtype=HALF)
    mask, ctx = [False, True, False], context("H100 SXM")
    found = backward(grad, image, filters, mask, ctx, stride=16, padding=0)
    assert found.between[1] == (size,)
    assert found.until == 1


@pytest.mark.parametrize(("kernel", "groups", "told"), [(3, 1, True), (1, 1, False), (3, 4, False)])
def test_which_gradients_take_everything(kernel, groups, told):
    made = (128, 64 // groups, kernel, kernel)
    grad, source = cuda(8, 128, 32, 32), cuda(8, 64, 32, 32)
    whole = 192 * PIXELS + 128 * (64 // groups) * kernel**2 * 4
    found = backward(grad, source, cuda(*made), [True, True, False], padding=kernel // 2, groups=groups)
    part = (whole,) if told else ()
    assert found.between == (part, part, ())
    error = (whole, 0) if told else (0, whole)
    assert found.between_errors == (error, error, (0, 0))


@pytest.mark.parametrize(
    ("card", "batch", "made", "read", "told"),
    [
        ("RTX 3060", 323, 16, 32, True),  # MnasNet_SGD_323: 3,352 MiB
        ("RTX 3060", 400, 16, 32, False),  # MnasNet_SGD_400: 3,506 MiB
        ("RTX 4060", 320, 16, 32, False),  # MnasNet_RMSprop_320: 2,870 MiB
        ("RTX 3060", 200, 24, 72, False),
        ("RTX 3060", 200, 16, 16, False),  # MobileNetV3
    ],
)
def test_gradients_of_few_channels_are_filled_up_to_tiles(card, batch, made, read, told):
    grad, source = cuda(batch, made, 43, 43), cuda(batch, read, 43, 43)
    ctx = context(card)
    found = backward(grad, source, cuda(made, read, 1, 1), [True, False, False], ctx, padding=0)
    assert found.between[0] == ((256 * batch * 43 * 43 * 4,) if told else ())


@pytest.mark.parametrize(("side", "told"), [(6, True), (8, True), (11, False)])
@pytest.mark.parametrize("card", ["RTX 3060", "RTX 4060"])
def test_gradients_of_1x1_filters_take_everything_where_images_are_small(card, side, told):
    grad, source = cuda(64, 480, side, side), cuda(64, 80, side, side)
    found = backward(grad, source, cuda(480, 80, 1, 1), [False, True, False], context(card), padding=0)
    whole = (480 + 80) * 64 * side * side * 4 + 480 * 80 * 4
    assert found.between[1] == ((whole,) if told else ())
    below, above = found.between_errors[1]
    assert below + above == whole


@pytest.mark.parametrize(
    ("filters", "changes", "forward", "told"),
    [
        pytest.param((128, 64, 1, 1), {"padding": 0}, False, (False, False), id="1x1"),
        pytest.param((128, 16, 3, 3), {"groups": 4}, True, (False, True), id="groups"),
        pytest.param((128, 64, 2, 2), {"padding": 0}, False, (True, True), id="2x2"),
        pytest.param((128, 64, 5, 5), {"padding": 2}, True, (False, True), id="5x5"),
    ],
)
def test_capability_8_9_has_engines_of_its_own(filters, changes, forward, told):
    ctx = context("RTX 4060")
    source, weight = cuda(8, 64, 32, 32), cuda(*filters)
    side = 31 if filters[-1] == 2 else 32
    whole = (64 * 32 * 32 + 128 * side * side) * 8 * 4 + math.prod(filters) * 4
    assert conv(source, weight, ctx, **changes).after == ((whole,) if forward else ())
    found = backward(cuda(8, 128, side, side), source, weight, [True, True, False], ctx, **changes)
    assert found.between[:2] == tuple((whole,) if each else () for each in told)
    strided = conv(source, weight, ctx, **{**changes, "stride": 2})
    assert bool(strided.after) is (filters[-1] == 5)


@pytest.mark.parametrize(
    ("filters", "side", "groups", "stride", "told"),
    [
        ((48, 16, 1, 1), 43, 1, 1, (0, 0, 300 * 48 * 16 * 4)),
        ((96, 576, 1, 1), 6, 1, 1, (0, 0, 300 * 96 * 576 * 4)),
        ((320, 1280, 1, 1), 1, 1, 1, (0, 0, 0)),
        ((320, 1152, 1, 1), 3, 1, 1, (17_372_160,) * 3),
        ((160, 16, 3, 3), 6, 10, 1, (13_916_160,) * 3),
        ((32, 3, 3, 3), 86, 1, 2, (0, None, 0)),
    ],
    ids=["1x1", "1x1-small", "1x1-pixel", "1x1-tiny", "groups", "colours"],
)
def test_what_an_h200_took(filters, side, groups, stride, told):
    # The engines that torch 2.11 with cuDNN 9.19 ran there for most shapes alike, in trainings of MnasNet and RegNetX
    ctx, padding = context("H200"), filters[-1] // 2
    source, weight = cuda(300, filters[1] * groups, side, side), cuda(*filters)
    out = (side + 2 * padding - filters[-1]) // stride + 1
    found = conv(source, weight, ctx, stride=stride, padding=padding, groups=groups)
    assert found.after == ((told[0],) if told[0] else ())
    if stride == 1:
        grad = cuda(300, filters[0], out, out)
        found = backward(grad, source, weight, [True, True, False], ctx, padding=padding, groups=groups)
        assert found.between[:2] == tuple((size,) if size else () for size in told[1:])


@pytest.mark.parametrize(
    ("filters", "changes", "choice"),
    [
        ((128, 64, 3, 3), {}, ""),
        ((128, 64, 1, 1), {"padding": 0}, "FORWARD 1x1"),
        ((128, 64, 1, 1), {"padding": 0, "stride": 2}, "FORWARD 1x1 strided"),
        ((128, 16, 3, 3), {"groups": 4}, "FORWARD groups"),
    ],
)
def test_one_choice_decides_the_engine_of_many_shapes(filters, changes, choice):
    assert conv(cuda(8, 64, 32, 32), cuda(*filters), **changes).choices == (choice,)
    last = conv(channels_last(8, 64, 32, 32), channels_last(*filters), **changes)
    assert last.choices == ("",)


def test_a_transposed_convolution_reads_what_it_makes():
    # Its gradient is a plain convolution of the gradient that comes in
    grad, source, weight = cuda(8, 24, 32, 32), cuda(8, 64, 32, 32), cuda(64, 24, 1, 1)
    found = backward(grad, source, weight, [True, False, False], padding=0, transposed=True)
    assert found.between[0] == (24 * PIXELS + 64 * 24 * 4,)


def test_channels_last_needs_no_transposing():
    found = conv(channels_last(8, 64, 32, 32), channels_last(128, 64, 3, 3))
    assert found.before == found.after == ()
    assert found.error_bytes > 0
    assert found.error_below_bytes == 0


def test_narrow_channels_are_padded():
    # Three channels of halves to eight, in the input and in the filters
    found = conv(channels_last(8, 3, 32, 32, dtype=HALF), channels_last(64, 3, 3, 3, dtype=HALF))
    assert found.after == (8 * 8 * 32 * 32 * 2 + 64 * 8 * 9 * 2,)


def test_a_mixed_layout_is_made_channels_last_first():
    found = conv(channels_last(8, 64, 32, 32), cuda(128, 64, 3, 3))
    assert found.after == (
        128 * 64 * 9 * 4,
    )  # the filters, brought to the layout of the data, after the result
    source = conv(cuda(8, 64, 32, 32), channels_last(128, 64, 3, 3))
    assert source.before == (8 * 64 * 32 * 32 * 4,)  # the input before it


def test_a_strided_sequence_is_made_contiguous():
    with FAKE:
        sequence = cuda(8, 100, 64).transpose(1, 2)
    found = conv(sequence, cuda(32, 64, 3), context("T4"))
    assert found.before == (8 * 64 * 100 * 4,)


def test_the_gradients_of_cudnn_come_in_turn():
    grad, source, weight = cuda(8, 128, 32, 32), cuda(8, 64, 32, 32), cuda(128, 64, 3, 3)
    whole = 8 * 64 * 32 * 32 * 4 + 128 * 64 * 9 * 4 + 8 * 128 * 32 * 32 * 4
    found = backward(grad, source, weight, [True, True, False])
    assert found.between == ((whole,), (whole,), ())
    with FAKE:
        expanded = cuda(8, 128, 1, 1).expand(8, 128, 32, 32)
    copied = backward(expanded, source, weight, [True, True, False])
    dense = 8 * 128 * 32 * 32 * 4
    assert copied.between == ((dense, whole), (dense, whole), ())


def test_a_gradient_of_the_other_layout_is_copied_once():
    grad, source = cuda(8, 128, 32, 32), channels_last(8, 64, 32, 32)
    weight = channels_last(128, 64, 3, 3)
    found = backward(grad, source, weight, [True, True, False])
    assert found.before == (8 * 128 * 32 * 32 * 4,)
    assert found.between[0] == ()


def test_the_bias_is_summed_last():
    # 64 channels of 64 x 56 x 56: the sum over batch and pixels is split over blocks
    grad, source, weight = cuda(64, 64, 56, 56), cuda(64, 64, 56, 56), cuda(64, 64, 1, 1)
    found = backward(grad, source, weight, [False, False, True], padding=0)
    summed = ask(aten.sum.dim_IntList, grad, [0, 2, 3])
    assert summed is not None
    assert found.between == ((), (), summed.after)


def test_the_environment_bounds_workspaces():
    capped = context(environ={"CUDNN_CONV_WSCAP_DBG": "1"})
    found = conv(cuda(8, 64, 32, 32), cuda(128, 64, 1, 1), capped, padding=0)
    assert found.after == (1 << 20,)
    assert found.error_bytes == 0
    assert conv(cuda(8, 64, 32, 32), cuda(128, 64, 3, 3), capped).error_bytes == 1 << 20


def test_benchmark_mode_searches_once_and_empties_the_cache():
    ctx = context(cudnn_benchmark=True, cudnn_tf32=False)
    source, weight = cuda(8, 64, 32, 32), cuda(128, 64, 3, 3)
    data, filters = 8 * (64 + 128) * 32 * 32 * 4, 128 * 64 * 9 * 4
    kept = 128 * 64 * 25 * 4 + 4 * 128
    first = conv(source, weight, ctx)
    assert first.after == (data * 36 // 16 + 4 * filters, given_back(1), EMPTY_CACHE, kept)
    assert conv(source, weight, ctx).after == (kept,)
    assert conv(cuda(16, 64, 32, 32), weight, ctx).after != (kept,)  # another shape is searched anew
    quiet = context(cudnn_benchmark=True, conv_benchmark_empties_cache=False)
    assert EMPTY_CACHE not in conv(source, weight, quiet).after


def test_the_search_gives_back_its_own_block_beside_a_copy():
    ctx = context(cudnn_benchmark=True)
    found = conv(channels_last(8, 64, 32, 32), cuda(128, 64, 3, 3), ctx)
    assert found.after[0] == 128 * 64 * 9 * 4
    assert found.after[2] == given_back(2)


def test_fused_ops_make_a_missing_bias():
    source, weight = cuda(8, 64, 32, 32), cuda(128, 64, 3, 3)
    out = cuda(8, 128, 32, 32)
    args = (source, weight, None, [1, 1], [1, 1], [1, 1], 1)
    found = extras(aten.cudnn_convolution_relu.default, args, {}, out, context(cudnn_tf32=False))
    assert found is not None
    assert found.after == (128 * 4, 128 * 64 * 25 * 4 + 4 * 128)


@pytest.mark.parametrize(
    ("dtype", "card", "expected"),
    [
        (torch.float16, "T4", True),
        (torch.float32, "T4", False),
        (torch.float32, "A100 80GB", True),
        (torch.float64, "A100 80GB", False),
    ],
)
def test_tensor_cores_by_type_and_capability(dtype, card, expected):
    assert uses_tensor_cores(dtype, context(card)) is expected
