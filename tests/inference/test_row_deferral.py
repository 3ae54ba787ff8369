"""Large results some rows at a time: the same values, no large tensor, and the plain program where that cannot be."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.inference.conftest import LargestResult
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit.errors import VramfitError
from vramfit.inference.row_deferral import RowChunks, row_chunks
from vramfit.inference.row_deferral.deferred_rows import DeferredRows
from vramfit.virtual.gpu import VirtualGPU

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("kept_workspaces")]

LENGTH, HEADS, SIZE = 96, 4, 16
SCORES = 2 * HEADS * LENGTH * LENGTH * 4
SLICE = 8192


def attention_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, LENGTH, HEADS, SIZE).transpose(1, 2) for _ in range(3))


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(SIZE), dim=-1) @ v


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(2, 1, 1, LENGTH)
    mask[1, ..., 50:] = torch.finfo(torch.float32).min
    weights = F.softmax(q @ k.mT * 0.3 + mask, dim=-1, dtype=torch.float64).to(q.dtype)
    return F.dropout(weights, p=0.5, training=False).matmul(v)


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q.matmul(k.transpose(2, 3))
    scores += torch.linspace(0, 1, LENGTH)[:, None]
    scores.mul_(0.5).masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return nn.Softmax(-1)(scores) @ v


def cogview(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT) / 32
    scores = (scores - scores.amax(dim=-1).unsqueeze(-1)) * 32
    return scores.softmax(-1) @ v


def flattened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (one.reshape(2 * HEADS, LENGTH, SIZE) for one in (q, k, v))
    scores = torch.bmm(q / 4, k.transpose(1, 2)).view(2, HEADS, LENGTH, LENGTH) + torch.ones(1, HEADS, 1, 1)
    return torch.bmm(scores.softmax(-1).reshape(2 * HEADS, LENGTH, LENGTH), v)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Relative biases in two tables: their axes are queries and keys, those of the scores examples, heads, queries."""
    apart = torch.arange(LENGTH)[None, :, None] - torch.arange(LENGTH)[None, None] + LENGTH
    first = torch.linspace(-1, 1, 2 * LENGTH * HEADS).view(-1, HEADS)[apart].permute(0, 3, 1, 2).contiguous()
    second = F.embedding(apart // 2, torch.linspace(2, 0, 2 * LENGTH * HEADS).view(-1, HEADS)).permute(
        0, 3, 1, 2
    )
    scores = q @ k.mT
    scores += (first + second) / 2
    scores = scores + (first * 2)[:, :, -LENGTH:, :]
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("attend", [biased, scaled, masked, in_place, cogview, flattened])
@pytest.mark.parametrize("slice_bytes", [1, SLICE, SCORES // 3])
def test_attention_written_out_equals_itself(
    attend: Callable[..., torch.Tensor], slice_bytes: int, largest: LargestResult
) -> None:
    q, k, v = attention_inputs()
    with torch.no_grad():
        expected = attend(q, k, v)
        with row_chunks(RowChunks(slice_bytes=slice_bytes)), largest:
            found = attend(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    output = 2 * HEADS * LENGTH * SIZE * 4
    # Twice the slice where softmax is in float64; how far pairs are apart is the model's own, in 64 bits.
    assert largest.most <= max(output, 2 * slice_bytes, LENGTH * LENGTH * (8 if attend is biased else 1))


def gated(x: torch.Tensor, wide: list[torch.Tensor]) -> torch.Tensor:
    gate, up, down = wide
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def split(x: torch.Tensor, wide: list[torch.Tensor]) -> torch.Tensor:
    gate, up, down = wide
    left, right = F.linear(x, torch.cat([gate, up])).chunk(2, dim=-1)
    return F.linear(left * F.gelu(right), down)


def normed(x: torch.Tensor, wide: list[torch.Tensor]) -> torch.Tensor:
    gate, _, down = wide
    y = torch.tanh(F.linear(x, gate, torch.ones(len(gate))))
    return F.linear(F.layer_norm(y, (y.shape[-1],)), down)


@pytest.mark.parametrize("feed", [gated, split, normed])
def test_feed_forward_layers_equal_themselves(
    feed: Callable[..., torch.Tensor], largest: LargestResult
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 24)
    wide = [torch.randn(96, 24), torch.randn(96, 24), torch.randn(24, 96)]
    with torch.no_grad():
        expected = feed(x, wide)
        with row_chunks(RowChunks(slice_bytes=4096)), largest:
            found = feed(x, wide)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert largest.most <= 2 * 96 * 24 * 4  # the joined weights; the wide result has 57,600 bytes


SDPA: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.arange(LENGTH) % 3 > 0},
    {"attn_mask": (torch.arange(LENGTH) % 3 > 0)[:, None].expand(LENGTH, LENGTH)},  # rows that see nothing
    {"attn_mask": torch.linspace(-1, 1, LENGTH)[:, None]},
    {"scale": 0.3},
    {"enable_gqa": True},
]


@pytest.mark.parametrize("options", SDPA, ids=lambda options: "-".join(options) or "plain")
def test_attention_that_no_fused_kernel_takes(options: dict[str, Any], largest: LargestResult) -> None:
    q, k, v = attention_inputs()
    if options.get("enable_gqa"):
        k, v = k[:, :2], v[:, :2]
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].expand(2, 1, LENGTH, LENGTH)
    with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        with row_chunks(RowChunks(slice_bytes=SLICE)), largest:
            found = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert largest.most < SCORES / 4


def test_whatever_else_is_done_gets_the_whole() -> None:
    q, k, _ = attention_inputs()
    with torch.no_grad():
        plain = q @ k.mT
        with row_chunks(RowChunks(slice_bytes=SLICE)):
            scores = q @ k.mT
            assert (
                isinstance(scores, DeferredRows) and scores.shape == plain.shape and scores.facts.full is None
            )
            assert torch.equal(scores[..., 3, :], plain[..., 3, :])
            assert torch.equal(torch.sort(q @ k.mT).values, torch.sort(plain).values)
            assert torch.equal((q @ k.mT).mean(1), plain.mean(1))  # over the heads: that axis is lost
            assert torch.equal((q @ k.mT).sum(2), plain.sum(2))
            assert (q @ k.mT).max(-1).values.tolist() == plain.max(-1).values.tolist()
            assert float((q @ k.mT)[0, 0, 0, 0]) == float(plain[0, 0, 0, 0])
            written = q @ k.mT
            written[..., 0] = 7.0
            assert bool((written[..., 0] == 7).all())
            assert torch.equal((q @ k.mT).mT @ q, plain.mT @ q)
        late = scores * 2  # outside of the block it is computed all the same
        assert torch.equal(late.values() if isinstance(late, DeferredRows) else late, plain * 2)


def test_what_cannot_be_followed_is_told() -> None:
    q, k, v = attention_inputs()
    with torch.no_grad(), row_chunks(RowChunks(slice_bytes=SLICE)):
        scores = q @ k.mT
        view = scores.transpose(1, 2)
        with pytest.raises(VramfitError, match="of which it has a view"):
            scores.add_(1)
        assert view.shape == (2, LENGTH, HEADS, LENGTH)
        scores = (q @ k.mT).softmax(-1)
        q.add_(1)
        with pytest.raises(VramfitError, match="was written to that attention-chunking still had to read"):
            scores @ v


def test_gradients_and_small_results_are_left_alone() -> None:
    q, k, _ = attention_inputs()
    with row_chunks(RowChunks(slice_bytes=SLICE)):
        assert type(q @ k.mT) is torch.Tensor  # gradients are on
        with torch.no_grad():
            assert type(q[..., :8, :] @ k[..., :8, :].mT) is torch.Tensor
            assert type(F.linear(q, torch.ones(SIZE, SIZE))) is torch.Tensor
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = q @ k.mT
                assert isinstance(scores, DeferredRows) and scores.dtype == torch.bfloat16
                found = scores.softmax(-1) @ k
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = (q @ k.mT).softmax(-1) @ k
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LayoutLMConfig", "LayoutLMModel", {}),
    ("LayoutLMv3Config", "LayoutLMv3Model", {"visual_embed": False, "coordinate_size": 6, "shape_size": 4}),
    (
        "LayoutLMv3Config",
        "LayoutLMv3Model",
        {
            "visual_embed": False,
            "coordinate_size": 6,
            "shape_size": 4,
            "has_relative_attention_bias": True,
            "has_spatial_attention_bias": True,
        },
    ),
    ("DebertaV2Config", "DebertaV2Model", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("T5Config", "T5EncoderModel", {"d_model": 32, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2}),
]


@pytest.mark.parametrize(
    ("config", "kind", "options"), MODELS, ids=[f"{name}-{len(options)}" for _, name, options in MODELS]
)
def test_models_of_transformers_equal_themselves(config: str, kind: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 128}
    made = getattr(transformers, config)(**({} if "d_model" in options else small), vocab_size=100, **options)
    made._attn_implementation = "eager"
    model = getattr(transformers, kind)(made).eval()
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.randint(1, 100, (2, 64))}
    inputs["attention_mask"] = (torch.arange(64) < torch.tensor([[64], [40]])).long()
    if "Layout" in kind:
        inputs["bbox"] = torch.cat([torch.randint(0, 50, (2, 64, 2)), torch.randint(50, 99, (2, 64, 2))], -1)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with row_chunks(RowChunks(slice_bytes=2048)):
            found = model(**inputs).last_hidden_state
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_card_never_holds_the_scores(gpu: VirtualGPU) -> None:
    length, width = 1024, 64
    x = torch.zeros(1, 8, length, width, device="cuda")

    def peak(attend: Callable[[], torch.Tensor]) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend()
        return torch.cuda.max_memory_allocated() - before

    scores = 8 * length * length * 4
    with torch.no_grad():
        attend = lambda: scaled(x, x, x)  # noqa: E731
        attend()  # cuBLAS has its workspace from here on
        assert peak(attend) >= 2 * scores
        with row_chunks(RowChunks(slice_bytes=1 << 20)):
            # The output, a slice as it is computed, and the one before it.
            assert peak(attend) <= x.nbytes + 3 * (1 << 20)


def test_it_can_be_copied() -> None:
    assert copy.deepcopy(RowChunks(slice_bytes=5)) == RowChunks(slice_bytes=5)


def test_what_is_used_again_is_computed_once_more_and_then_kept() -> None:
    """A residual stream that began with a wide layer does not become a recipe of all layers."""
    torch.manual_seed(0)
    x, wide, square = torch.randn(64, 16), torch.randn(64, 16), torch.randn(64, 64) / 64

    def network() -> torch.Tensor:
        stream = F.linear(x, wide)
        for _ in range(4):
            stream = stream + torch.tanh(F.linear(F.layer_norm(stream, (64,)), square))
        return stream

    with torch.no_grad():
        expected = network()
        with row_chunks(RowChunks(slice_bytes=1024)):
            found = network()
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
