"""Layers that arrive as one op allocate what the ops inside them do."""

import pytest
import torch
from torch import nn

from vramfit.virtual.gpu import VirtualGPU

WIDTH = 1 << 20  # bytes of one activation: 8 x 128 tokens of 256 floats


@pytest.fixture(scope="module")
def layer():
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # as it was before torch 2.15
        with VirtualGPU("A100 80GB"):
            yield nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda().eval()


def held(layer, **options):
    """Bytes above those before the call, at its highest."""
    source = torch.randn(8, 128, 256, device="cuda")
    with torch.no_grad():
        layer(source, **options)  # takes the workspace of cuBLAS
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        layer(source, **options)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_the_feed_forward_layers_are_the_peak(layer):
    # Residual, four times as wide between the two products, and the result of the second
    assert held(layer) == 6 * WIDTH


def test_a_mask_keeps_attention_from_the_fused_kernels(layer):
    # Packed heads, scores of 8 x 4 x 128 x 128 floats beside their softmax, and the mask as floats and as booleans
    mask = torch.zeros(8, 128, dtype=torch.bool, device="cuda")
    scores = 8 * 4 * 128 * 128 * 4
    assert held(layer, src_key_padding_mask=mask) == 3 * WIDTH + 2 * scores + 8 * 128 * (4 + 1)


def test_weights_of_attention_are_averaged_over_heads(layer):
    attention = nn.MultiheadAttention(256, 4, batch_first=True).cuda().eval()
    tokens = torch.randn(8, 128, 256, device="cuda")
    with torch.no_grad():
        out, weights = attention(tokens, tokens, tokens)
        assert (out.shape, weights.shape) == ((8, 128, 256), (8, 128, 128))
        assert attention(tokens, tokens, tokens, need_weights=False)[1] is None


def test_packed_sequences_attend_with_flash(layer):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tokens = torch.randn(300, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([0, 100, 200, 300], dtype=torch.int32, device="cuda")
    out = varlen.varlen_attn(tokens, tokens, tokens, lengths, lengths, 100, 100)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(torch.ones_like(out))
    # Beside gradients: float32 sums of 300 + 3 x 128 rows, a value and a head of 64 wide, for each of 8 heads
    assert torch.cuda.max_memory_allocated() - before >= 684 * 8 * 65 * 4


def test_the_choice_of_a_backend_is_told(layer):
    halves = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.float16)
    assert torch._fused_sdp_choice(halves, halves, halves) == 1  # flash
    singles = halves.float()
    assert torch._fused_sdp_choice(singles, singles, singles) == 2  # memory-efficient
    assert torch._fused_sdp_choice(singles.double(), singles.double(), singles.double()) == 0  # math
