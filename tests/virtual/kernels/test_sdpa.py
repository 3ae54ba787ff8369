from unittest import mock

import pytest
import torch

from vramfit.virtual.kernels import SdpaBackend, choose_backend
from vramfit.virtual.kernels.sdpa import gemm_alignment, priority, scaled_dot_product_attention

from .support import FAKE, aten, context, cuda

HALF = torch.bfloat16
CARDS = {
    "V100": "V100",
    "ampere": "A100 80GB",
    "ada": "RTX 4090",
    "hopper": "H100 SXM",
    "blackwell": "RTX 5090",
}


def qkv(shape=(2, 8, 128, 64), key=None, *, dtype=HALF, grad=False):
    key = key or shape
    return tuple(cuda(*s, dtype=dtype, requires_grad=grad) for s in (shape, key, key))


def choose(tensors, ctx, mask=None, dropout=0.0, causal=False, gqa=False):
    return choose_backend(*tensors, mask, dropout, causal, gqa, ctx)


def test_flash_first_on_ampere_and_ada():
    assert choose(qkv(), context("A100 80GB")) is SdpaBackend.FLASH
    assert choose(qkv(), context("RTX 4090")) is SdpaBackend.FLASH


def test_cudnn_first_on_hopper_and_b200_but_not_on_geforce_blackwell():
    assert choose(qkv(), context("H100 SXM")) is SdpaBackend.CUDNN
    assert choose(qkv(), context("B200")) is SdpaBackend.CUDNN
    assert choose(qkv(), context("RTX 5090")) is SdpaBackend.FLASH


def test_cudnn_preference_can_be_withdrawn():
    ctx = context("H100 SXM", environ={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"})
    assert choose(qkv(), ctx) is SdpaBackend.FLASH
    assert choose(qkv(), context("H100 SXM", cudnn_sdp=False)) is SdpaBackend.FLASH
    assert choose(qkv(), context("H100 SXM", deterministic=True)) is SdpaBackend.FLASH
    assert choose(qkv(), context("H100 SXM", cudnn_version=91002)) is SdpaBackend.FLASH


def test_a_user_order_wins():
    order = (int(SdpaBackend.EFFICIENT), int(SdpaBackend.FLASH), int(SdpaBackend.MATH))
    assert choose(qkv(), context("H100 SXM", sdp_priority=order)) is SdpaBackend.EFFICIENT
    default = tuple(
        int(b) for b in (SdpaBackend.FLASH, SdpaBackend.EFFICIENT, SdpaBackend.MATH, SdpaBackend.CUDNN)
    )
    assert priority(context("H100 SXM", sdp_priority=default))[0] is SdpaBackend.CUDNN


def test_float32_goes_to_memory_efficient_and_float64_to_math():
    assert choose(qkv(dtype=torch.float32), context()) is SdpaBackend.EFFICIENT
    assert choose(qkv(dtype=torch.float64), context()) is SdpaBackend.MATH


def test_turing_and_volta_have_no_flash_and_no_bfloat16():
    assert choose(qkv(dtype=torch.float16), context("T4")) is SdpaBackend.EFFICIENT
    assert choose(qkv(dtype=HALF), context("T4")) is SdpaBackend.MATH


def test_a_mask_keeps_flash_away():
    mask = cuda(2, 1, 128, 128, dtype=HALF)
    assert choose(qkv(), context(), mask=mask) is SdpaBackend.EFFICIENT
    assert choose(qkv(), context("H100 SXM"), mask=mask) is SdpaBackend.CUDNN
    odd = cuda(2, 128, 128, dtype=HALF)  # three dimensions: cuDNN wants two or four
    assert choose(qkv(), context("H100 SXM"), mask=odd) is SdpaBackend.EFFICIENT


def test_causal_with_unequal_lengths_keeps_flash_away():
    tensors = qkv((2, 8, 64, 64), (2, 8, 128, 64))
    assert choose(tensors, context(), causal=True) is SdpaBackend.EFFICIENT
    assert choose(tensors, context()) is SdpaBackend.FLASH


@pytest.mark.parametrize(
    ("size", "dropout", "expected"),
    [
        (192, 0.1, SdpaBackend.FLASH),
        (200, 0.0, SdpaBackend.EFFICIENT),
        (256, 0.0, SdpaBackend.FLASH),
        (256, 0.1, SdpaBackend.EFFICIENT),
    ],
)
def test_training_wide_heads_on_ada(size, dropout, expected):
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    shape = (2, 8, 128, size)
    assert choose(qkv(shape, grad=True), context("RTX 4090"), dropout=dropout) is expected
    assert choose(qkv(shape), context("RTX 4090"), dropout=dropout) is SdpaBackend.FLASH
    assert choose(qkv(shape, grad=True), context("A100 80GB"), dropout=dropout) is SdpaBackend.FLASH


def test_heads_wider_than_256_or_unaligned():
    assert choose(qkv((2, 8, 128, 264)), context()) is SdpaBackend.EFFICIENT
    assert choose(qkv((2, 8, 128, 260)), context()) is SdpaBackend.MATH  # 260 is not a multiple of 8
    assert choose(qkv((2, 8, 128, 60)), context()) is SdpaBackend.FLASH  # padded by the wrapper
    assert gemm_alignment(HALF, context()) == 8
    assert gemm_alignment(torch.float32, context()) == 4
    assert gemm_alignment(torch.float32, context("T4")) == 1


def test_grouped_query_attention():
    tensors = qkv((2, 8, 128, 64), (2, 2, 128, 64))
    assert choose(tensors, context(), gqa=True) is SdpaBackend.FLASH
    assert choose(tensors, context()) is SdpaBackend.MATH  # heads differ and nobody said they may
    mask = cuda(128, 128, dtype=HALF)
    assert choose(tensors, context(), mask=mask, gqa=True) is SdpaBackend.MATH
    assert choose(tensors, context("H100 SXM"), mask=mask, gqa=True) is SdpaBackend.CUDNN


def test_one_head_of_keys_serves_all_queries_since_2_14():
    tensors = qkv((2, 8, 128, 64), (2, 1, 128, 64))
    mask = cuda(128, 128, dtype=HALF)
    assert choose(tensors, context(version=(2, 13))) is SdpaBackend.MATH
    assert choose(tensors, context(version=(2, 14))) is SdpaBackend.FLASH
    assert choose(tensors, context(version=(2, 14)), mask=mask) is SdpaBackend.EFFICIENT
    assert choose(tensors, context("H100 SXM", (2, 14))) is SdpaBackend.CUDNN
    two = qkv((2, 8, 128, 64), (2, 2, 128, 64))
    assert choose(two, context(version=(2, 14))) is SdpaBackend.MATH
    assert choose(two, context(version=(2, 14)), mask=mask, gqa=True) is SdpaBackend.EFFICIENT


def test_three_dimensional_inputs_get_a_batch_since_2_14():
    mask = cuda(8, 128, 128, dtype=HALF)
    assert choose(qkv((8, 128, 64)), context(version=(2, 13))) is SdpaBackend.MATH
    assert choose(qkv((8, 128, 64)), context(version=(2, 14))) is SdpaBackend.FLASH
    assert choose(qkv((8, 128, 64)), context(version=(2, 14)), mask=mask) is SdpaBackend.EFFICIENT
    assert choose(qkv((128, 64)), context(version=(2, 14))) is SdpaBackend.MATH


def test_dropout_in_sixteenths_for_cudnn_since_2_12():
    for dropout, version, expected in (
        (0.1, (2, 11), SdpaBackend.CUDNN),
        (0.1, (2, 12), SdpaBackend.FLASH),
        (0.125, (2, 12), SdpaBackend.CUDNN),
    ):
        assert choose(qkv(), context("H100 SXM", version), dropout=dropout) is expected


def test_offsets_that_are_not_aligned_keep_memory_efficient_attention_away_since_2_13():
    with FAKE:
        flat = torch.empty(2 * 8 * 128 * 64 + 1, device="cuda")
        shifted = flat[1:].view(2, 8, 128, 64)
    for version, expected in (((2, 12), SdpaBackend.EFFICIENT), ((2, 13), SdpaBackend.MATH)):
        assert choose((shifted, shifted, shifted), context(version=version)) is expected


@pytest.mark.parametrize(
    ("version", "size", "value_size", "grad", "expected"),
    [
        ((2, 10), 256, 256, False, SdpaBackend.FLASH),  # its cuDNN 9.10.2 is not preferred
        ((2, 13), 256, 256, True, SdpaBackend.CUDNN),
        ((2, 13), 192, 128, True, SdpaBackend.CUDNN),
        ((2, 13), 176, 176, True, SdpaBackend.CUDNN),
        ((2, 14), 256, 256, True, SdpaBackend.CUDNN),
        ((2, 14), 192, 128, True, SdpaBackend.CUDNN),
        ((2, 14), 176, 176, True, SdpaBackend.FLASH),  # not in its backward pass
        ((2, 14), 176, 176, False, SdpaBackend.CUDNN),
    ],
)
def test_wide_heads_on_hopper_by_release(version, size, value_size, grad, expected):
    query, key = (cuda(2, 8, 128, size, dtype=HALF, requires_grad=grad) for _ in range(2))
    value = cuda(2, 8, 128, value_size, dtype=HALF, requires_grad=grad)
    assert choose((query, key, value), context("H100 SXM", version)) is expected


def test_wide_heads_on_b200_by_release():
    for version, size, value_size, expected in (
        ((2, 13), 256, 256, SdpaBackend.FLASH),
        ((2, 13), 192, 128, SdpaBackend.CUDNN),
        ((2, 14), 256, 256, SdpaBackend.CUDNN),
    ):
        value = cuda(2, 8, 128, value_size, dtype=HALF)
        tensors = (cuda(2, 8, 128, size, dtype=HALF), cuda(2, 8, 128, size, dtype=HALF), value)
        assert choose(tensors, context("B200", version)) is expected


def test_2_15_keeps_older_versions_of_cudnn_from_gradients_that_are_not_finite():
    tensors = qkv((2, 8, 192, 64), grad=True)
    old = {"cudnn_version": 92400}
    assert choose(tensors, context("H100 SXM", (2, 14))) is SdpaBackend.CUDNN
    assert choose(tensors, context("H100 SXM", (2, 15))) is SdpaBackend.CUDNN
    assert choose(tensors, context("H100 SXM", (2, 15), **old)) is SdpaBackend.FLASH
    assert choose(tensors, context("H100 SXM", (2, 15), **old), causal=True) is SdpaBackend.CUDNN
    assert choose(qkv((2, 8, 192, 64)), context("H100 SXM", (2, 15), **old)) is SdpaBackend.CUDNN


def test_nothing_left_raises_as_on_a_card():
    ctx = context(flash_sdp=False, mem_efficient_sdp=False, math_sdp=False, cudnn_sdp=False)
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose(qkv(), ctx)


def test_cudnn_takes_at_most_65535_samples():
    assert choose(qkv((65_535, 1, 16, 64)), context("H100 SXM")) is SdpaBackend.CUDNN
    assert choose(qkv((65_536, 1, 16, 64)), context("H100 SXM")) is SdpaBackend.FLASH
    assert choose(qkv((65_536, 1, 16, 64)), context("H100 SXM", (2, 12))) is SdpaBackend.CUDNN
    assert choose(qkv((65_536, 1, 16, 64)), context("H100 SXM", (2, 15))) is SdpaBackend.EFFICIENT


def test_single_queries_are_kept_from_some_versions_of_cudnn():
    tensors = qkv((2, 8, 1, 64), (2, 8, 128, 64))
    assert choose(tensors, context("B200", (2, 13))) is SdpaBackend.CUDNN
    assert choose(tensors, context("B200", (2, 14))) is SdpaBackend.FLASH
    assert choose(tensors, context("B200", (2, 14), cudnn_version=92401)) is SdpaBackend.CUDNN
    assert choose(tensors, context("B200", (2, 15))) is SdpaBackend.CUDNN
    assert choose(tensors, context("H100 SXM", (2, 15))) is SdpaBackend.CUDNN


# -- the wrapper


def run(tensors, ctx, mask=None, dropout=0.0, causal=False, scale=None, gqa=False):
    """Names of the ops called, and the result."""
    called = []
    real = FAKE.dispatch

    def spy(func, types, args=(), kwargs=None):
        called.append(str(func))
        return real(func, types, args, kwargs)

    with FAKE, mock.patch.object(FAKE, "dispatch", spy):
        out = scaled_dot_product_attention(*tensors, mask, dropout, causal, scale, gqa, ctx)
    return called, out


def test_flash_pads_and_cuts_the_head():
    called, out = run(qkv((2, 8, 128, 60)), context())
    assert out.shape == (2, 8, 128, 60)
    assert out.untyped_storage().nbytes() == 2 * 8 * 128 * 64 * 2
    assert called.count("aten.constant_pad_nd.default") == 3
    assert "aten._scaled_dot_product_flash_attention.default" in called


def test_a_boolean_mask_becomes_additive():
    mask = cuda(2, 1, 128, 128, dtype=torch.bool)
    called, out = run(qkv(), context(), mask=mask)
    assert called[:3] == ["aten.scalar_tensor.default", "aten.scalar_tensor.default", "aten.where.self"]
    assert called[-1].startswith("aten._scaled_dot_product_efficient_attention")
    assert out.shape == (2, 8, 128, 64)


def test_an_unaligned_mask_is_padded_to_eight():
    tensors = qkv((2, 8, 100, 64))
    called, _ = run(tensors, context(), mask=cuda(100, 100, dtype=HALF))
    assert "aten.constant_pad_nd.default" in called
    called, _ = run(qkv(), context(), mask=cuda(128, 128, dtype=HALF))
    assert "aten.constant_pad_nd.default" not in called


def test_math_computes_in_float32_and_adds_the_mask_in_place():
    called, out = run(qkv((8, 128, 64)), context(), causal=True)
    assert out.dtype is HALF
    assert called.count("aten._to_copy.default") == 5  # three inputs up, the result and the weights down
    assert "aten.add_.Tensor" in called
    assert "aten._safe_softmax.default" in called
    called, _ = run(qkv((8, 128, 64)), context(half_reduction_math_sdp=True))
    assert "aten._to_copy.default" not in called


def test_three_dimensions_come_back_as_three_since_2_14():
    tensors = qkv((8, 128, 64), grad=True)
    called, out = run(tensors, context(version=(2, 14)))
    assert out.shape == (8, 128, 64)
    assert "aten._scaled_dot_product_flash_attention.default" in called
    mask = cuda(128, 128, dtype=HALF)
    called, out = run(tensors, context(version=(2, 14)), mask=mask)
    assert out.shape == (8, 128, 64)
    assert "aten._scaled_dot_product_efficient_attention.default" in called


def test_math_repeats_shared_heads():
    tensors = qkv((2, 8, 128, 64), (2, 2, 128, 64), dtype=torch.float64)
    called, out = run(tensors, context(), gqa=True)
    assert out.shape == (2, 8, 128, 64)
    assert "aten.expand.default" in called


def test_results_equal_torch_on_real_tensors():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 6, generator=generator) > 0.3
    ctx = context()
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}, {"scale": -0.5}):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        got = scaled_dot_product_attention(
            *(query, key, value, options.get("attn_mask"), 0.0),
            *(options.get("is_causal", False), options.get("scale"), False, ctx),
        )
        torch.testing.assert_close(got, expected)
    assert aten is torch.ops.aten
