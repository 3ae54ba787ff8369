"""cuDNN's attention: what its kernels keep, what an installed cuDNN is asked, and what becomes of its answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit import VirtualGPU
from vramfit.cudnn.questions import AttentionPass, AttentionQuestion
from vramfit.virtual.kernels import Extras

from .support import FAKE, aten, context, cuda, extras

HALF = torch.bfloat16
FORWARD = aten._scaled_dot_product_cudnn_attention.default
BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
SMALL = 512  # most that counters of a plan take
HOPPER, AMPERE = 256, 128  # what they take with kernels of these kinds


@dataclass
class Asker:
    """Answers every question about attention with one size, and keeps the questions."""

    size: int | None = 4096
    version: int = 92000
    questions: list[AttentionQuestion] = field(default_factory=list)

    def attention(self, question: AttentionQuestion) -> int | None:
        self.questions.append(question)
        return self.size


def heads_last(batch, heads, length, size):
    """As models make them: the memory has (batch, length, heads, size)."""
    with FAKE:
        return torch.empty(batch, length, heads, size, dtype=HALF, device="cuda").transpose(1, 2)


def forward(query, key, ctx, *, mask=None, stats=True, dropout=0.0, causal=False):
    out = heads_last(*query.shape)
    args = (query, key, key, mask, stats, dropout, causal)
    return extras(FORWARD, args, {}, (out, None, None, None, 0, 0, None, None, None), ctx)


def backward(query, key, ctx, *, grad=None, mask=None, dropout=0.0, causal=False):
    out, seed = heads_last(*query.shape), cuda()
    lengths = query.shape[2], key.shape[2]
    args = (out if grad is None else grad, query, key, key, out, cuda(*query.shape[:3], 1), seed, seed, mask)
    return extras(BACKWARD, (*args, None, None, *lengths, dropout, causal), {}, None, ctx)


ROWS, ACCUMULATOR = 2 * 16 * 500 * 4, 2 * 16 * 500 * 64 * 4
PADDED = 2 * 16 * 504 * 64 * 4  # 500 queries in rows of eight


@pytest.mark.parametrize(
    ("card", "length", "size", "below", "above"),
    [
        ("H100 SXM", 500, ROWS + ACCUMULATOR + HOPPER, 0, SMALL - HOPPER),
        ("B200", 500, ROWS + ACCUMULATOR, 0, PADDED + SMALL),
        *(
            (card, length, ROWS + ACCUMULATOR + PADDED + AMPERE, PADDED + AMPERE, SMALL - AMPERE)
            # keys of one tile: a kernel of Ampere's kind on Blackwell, too
            for card, length in (("A100 80GB", 500), ("RTX 4090", 500), ("RTX 5090", 500), ("B200", 77))
        ),
    ],
)
def test_backward_keeps_what_its_kind_of_kernel_does(card, length, size, below, above):
    found = backward(heads_last(2, 16, 500, 64), heads_last(2, 16, length, 64), context(card))
    assert found == Extras(after=(size,), error_bytes=above, error_below_bytes=below)


def test_backward_finds_room_for_gradients_of_shared_heads():
    found = backward(heads_last(2, 16, 128, 64), heads_last(2, 4, 128, 64), context("H100 SXM"))
    rows, expanded = 2 * 16 * 128 * 4, 2 * 16 * 128 * (64 + 64) * 2
    assert found.after == (rows + rows * 64 + expanded + HOPPER,)


def test_blackwell_keeps_the_random_bits_of_dropout():
    query, bits = heads_last(2, 16, 1024, 64), 2 * 16 * 1024 * 1024 // 8
    for card, kept in (("B200", bits), ("H100 SXM", 0), ("A100 80GB", 0)):
        ctx = context(card)
        plain, dropping = backward(query, query, ctx), backward(query, query, ctx, dropout=0.125)
        assert dropping.after[0] - plain.after[0] == kept
        counters = HOPPER if card == "H100 SXM" else 0
        assert sum(forward(query, query, ctx, dropout=0.125).after) == kept + counters
    short = heads_last(2, 16, 7, 64)  # one tile of 128 x 128 for each head, and a kernel of its own
    found = backward(short, short, context("B200"), dropout=0.125)
    assert found.after == (2 * 16 * (7 * 65 * 4 + 128 * 128 // 8),)


def test_forward_of_several_queries_takes_next_to_nothing():
    query = heads_last(2, 16, 128, 64)
    assert forward(query, query, context("H100 SXM")) == Extras(after=(HOPPER,), error_bytes=SMALL - HOPPER)
    assert forward(query, query, context("A100 80GB")) == Extras(error_bytes=SMALL)


@pytest.mark.parametrize(("keys", "parts"), [(200, 0), (1000, 7), (65_536, 33)])
def test_a_single_query_may_be_shared_out_among_parts_of_the_keys(keys, parts):
    # H100: 132 multiprocessors with two blocks each, for 8 heads of keys; parts of 128 keys at least
    found = forward(heads_last(1, 32, 1, 128), heads_last(1, 8, keys, 128), context("H100 SXM"))
    assert found == Extras(error_bytes=parts * 32 * 130 * 4 + SMALL)


def test_no_queries_take_nothing():
    assert forward(heads_last(2, 4, 0, 64), heads_last(2, 4, 8, 64), context("H100 SXM")) is None


def test_a_gradient_that_is_not_dense_is_copied_first():
    query = heads_last(2, 16, 500, 64)
    with FAKE:
        grad = torch.empty(2, 16, 64, 500, dtype=HALF, device="cuda").transpose(2, 3)
    asker = Asker()
    found = backward(query, query, context("H100 SXM", asker=asker), grad=grad)
    assert found.after == (grad.numel() * 2, 4096)
    assert asker.questions[0].grad == asker.questions[0].out


# -- asking


def test_the_question_has_what_torch_tells_cudnn():
    asker = Asker()
    ctx = context("H100 SXM", asker=asker)
    query, key = heads_last(2, 16, 500, 64), heads_last(2, 4, 300, 64)
    forward(query, key, ctx, stats=False, causal=True)
    backward(query, key, ctx, dropout=0.25)
    first, second = asker.questions
    assert (first.kind, first.stats, first.causal, first.dropout) == (AttentionPass.FORWARD, False, True, 0.0)
    assert (second.kind, second.causal, second.dropout) == (AttentionPass.BACKWARD, False, 0.25)
    for question in asker.questions:
        assert question.dtype == "bfloat16" and question.bias is None
        assert question.query.dims == (2, 16, 500, 64)
        assert question.query.strides == (500 * 16 * 64, 64, 16 * 64, 1)
        assert question.key.dims == question.value.dims == (2, 4, 300, 64)
        assert question.out == question.query
    assert first.grad is None and second.grad == second.out


@pytest.mark.parametrize(
    ("shape", "dims", "strides"),
    [
        ((500, 300), (2, 1, 500, 300), (0, 150_000, 300, 1)),
        ((1, 300), (2, 1, 500, 300), (0, 0, 0, 1)),
        ((2, 16, 500, 300), (2, 16, 500, 300), (16 * 150_000, 150_000, 300, 1)),
        ((1, 1, 500, 300), (2, 1, 500, 300), (0, 150_000, 300, 1)),
    ],
)
def test_a_mask_is_told_as_torch_expands_it(shape, dims, strides):
    asker = Asker()
    ctx = context("H100 SXM", asker=asker)
    query, key = heads_last(2, 16, 500, 64), heads_last(2, 16, 300, 64)
    for call in (forward, backward):
        call(query, key, ctx, mask=cuda(*shape, dtype=torch.float32))
        bias = asker.questions[-1].bias
        assert (bias.dims, bias.strides, asker.questions[-1].bias_dtype) == (dims, strides, "float32")
        with FAKE:
            expanded = torch.empty(shape, device="cuda").expand(dims)
        assert bias.strides == expanded.stride()


def test_an_answer_of_the_same_version_is_certain():
    query = heads_last(2, 16, 500, 64)
    for call in (forward, backward):
        assert call(query, query, context("H100 SXM", asker=Asker())) == Extras(after=(4096,))
        assert call(query, query, context("H100 SXM", asker=Asker(0))) is None


def test_an_answer_of_another_version_has_the_bar_of_the_rules():
    query = heads_last(2, 16, 500, 64)
    found = backward(query, query, context("H100 SXM", asker=Asker(version=91002)))
    size = ROWS + ACCUMULATOR
    assert found == Extras(after=(4096,), error_bytes=size + SMALL - 4096)
    found = backward(query, query, context("H100 SXM", asker=Asker(size + 1024, version=91002)))
    assert found == Extras(after=(size + 1024,), error_below_bytes=1024 - HOPPER)


def test_what_cudnn_cannot_say_is_left_to_the_rules():
    query = heads_last(2, 16, 500, 64)
    rules = backward(query, query, context("H100 SXM"))
    assert backward(query, query, context("H100 SXM", asker=Asker(None))) == rules
    ragged, asker = {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}, Asker()
    assert backward(query, query, context("H100 SXM", asker=asker, environ=ragged)) == rules
    assert not asker.questions


def test_a_program_is_counted_with_the_answers():
    mib = 1 << 20
    with VirtualGPU("H100 SXM", context_bytes=0) as gpu:
        gpu._machine.cudnn_asker = Asker(700 * mib, version=92000)
        query = torch.empty(2, 8, 256, 64, dtype=HALF, device="cuda", requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which 2.10 does not prefer
            functional.scaled_dot_product_attention(query, query, query).sum().backward()
        assert 700 * mib < torch.cuda.max_memory_allocated() < 710 * mib
        kinds = {question.kind for question in gpu._machine.cudnn_asker.questions}
    assert kinds == set(AttentionPass)
