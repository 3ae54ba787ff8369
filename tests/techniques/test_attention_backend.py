"""Attention in fused kernels: what stands in their way, what they give, and what they keep."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.peaks import kept_bytes
from tests.techniques.toys import Language, all_toys, gradients, language_loss, numbers, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile, setting_from_plain, setting_to_plain
from vramfit.techniques.attention_backend import AttentionBackend, AttentionSetting, SdpaName, unread_weights
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = pytest.mark.torch_versions

BATCH, HEADS, LENGTH, WIDTH, LAYERS = 2, 4, 256, 64, 2
FUSED = (SdpaName.FLASH, SdpaName.EFFICIENT)


@functools.cache
def _transformers() -> Any:
    return pytest.importorskip("transformers")


def gpt2(implementation: str = "eager", dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = _transformers().GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=97,
        n_positions=LENGTH,
        attn_pdrop=dropout,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    config._attn_implementation = implementation
    model: nn.Module = _transformers().GPT2LMHeadModel(config)
    return model.train()


def workload(length: int = 16, dropout: float = 0.0) -> Workload:
    return Workload(
        model=lambda: gpt2(dropout=dropout),
        batch=lambda batch_size: tokens(batch_size, length),
        sizes={"batch_size": BATCH},
        loss=lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss,
        optimizer=torch.optim.SGD,
    )


class Heads(nn.Module):
    """Asks for weights in several ways, and reads them in some."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        for name in ("first", "second", "read", "passed", "without", "later"):
            self.add_module(name, nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x, x, x)[0]
        y, _ = self.second(x, x, x, key_padding_mask=None)
        z, weights = self.read(y, y, y)
        z = z * weights.mean()
        z = z + self.call(self.passed, z)
        z = z + self.without(z, z, z, need_weights=False)[0]
        return x + z

    def call(self, attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
        pair = self.later(x, x, x)
        return attention(x, x, x)[0] + pair[0] * pair[1].mean()  # type: ignore[no-any-return]


def heads(dropout: float = 0.0, length: int = 8) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Heads(dropout)

    return Workload(
        model=model,
        batch=lambda batch_size: numbers(batch_size, length, WIDTH),
        sizes={"batch_size": BATCH},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD,
    )


def attached(model: nn.Module, **setting: Any) -> AttachedProgram:
    live = AttachedProgram(model, None)
    AttentionBackend().attach(live, AttentionSetting(**setting))
    return live


def options(model: nn.Module, **facts: Any) -> list[AttentionSetting]:
    profile = Profile(model=model, optimizer=None, sizes={}, **({"trains": True} | facts))
    return list(AttentionBackend().options(profile))


def close(plain: Workload, setting: AttentionSetting) -> None:
    expected, found = gradients(plain), gradients(AttentionBackend().apply(plain, setting))
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_gradients_are_the_same_but_for_rounding() -> None:
    close(workload(), AttentionSetting(eager=True))
    close(heads(), AttentionSetting(unread=("first", "second")))
    model = Language(dropout=0.0)
    math = Workload(
        model=lambda: copy.deepcopy(model),
        batch=lambda batch_size: tokens(batch_size),
        sizes={"batch_size": BATCH},
        loss=language_loss,
        optimizer=torch.optim.SGD,
    )
    close(math, AttentionSetting(backends=(SdpaName.MATH,)))


def test_eager_models_of_transformers_are_changed_and_changed_back() -> None:
    model = gpt2()
    live = attached(model, eager=True)
    assert model.config._attn_implementation == "sdpa"
    assert all(block.attn.config._attn_implementation == "sdpa" for block in model.transformer.h)
    assert copy.deepcopy(model).config._attn_implementation == "sdpa"
    live.undo()
    assert model.config._attn_implementation == "eager"


def test_weights_that_are_thrown_away_are_found_in_the_source() -> None:
    assert unread_weights(Heads()) == ["first", "second"]
    assert unread_weights(nn.TransformerEncoderLayer(16, 2)) == []


def test_hooks_and_evaluation_still_see_the_weights() -> None:
    model, x = Heads(), numbers(2, 8, WIDTH)
    attached(model, unread=("first",))
    assert model.first(x, x, x)[1] is None
    with torch.no_grad():
        assert model.first(x, x, x)[1] is not None
    assert model.eval().first(x, x, x)[1] is not None
    seen: list[Any] = []
    model.train().first.register_forward_hook(lambda _m, _i, output: seen.append(output[1]))
    model(x)
    assert seen[0] is not None


def test_names_copies_pickles_and_undo() -> None:
    model, x = Heads(), numbers(2, 8, WIDTH)
    keys = list(model.state_dict())
    live = attached(model, unread=("first",), backends=FUSED)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x)) and other.first(x, x, x)[1] is None
    live.undo()
    assert model.first(x, x, x)[1] is not None and type(model) is Heads


class Noting(nn.Module):
    """Attends, and notes which backends are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = torch.backends.cuda
        self.seen.append((b.flash_sdp_enabled(), b.mem_efficient_sdp_enabled(), b.cudnn_sdp_enabled()))
        return F.scaled_dot_product_attention(x, x, x)


def test_what_is_recomputed_takes_the_same_backend() -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Noting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.attention, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Recomputing()
    attached(model, backends=(SdpaName.EFFICIENT,))
    model(torch.randn(1, 2, 4, 8, requires_grad=True)).sum().backward()
    assert model.attention.seen == [(False, True, False)] * 2
    assert torch.backends.cuda.flash_sdp_enabled()


def test_dropout_has_to_be_allowed_to_draw_otherwise() -> None:
    technique = AttentionBackend()
    for model, setting in ((gpt2(dropout=0.1), {"eager": True}), (Heads(0.1), {"unread": ("first",)})):
        with pytest.raises(UsageError, match="attention has dropout"):
            attached(model, **setting)
        found = options(model)
        assert [setting.redraws for setting in found] == [True]
        assert technique.promise(found[0]).numerics is Numerics.APPROXIMATE
        technique.attach(AttachedProgram(model, None), found[0])
    attached(gpt2(dropout=0.1).eval(), eager=True)
    assert technique.promise(AttentionSetting(eager=True)).numerics is Numerics.ROUNDING


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({}, "attention-backend has nothing to change"),
        ({"eager": True}, "no eager attention that could be fused"),
        ({"unread": ("third",)}, r"'third' is not an nn\.MultiheadAttention"),
    ],
)
def test_what_cannot_change_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attached(Heads(), **setting)


def test_a_model_that_shows_its_attentions_stays_eager() -> None:
    model = gpt2()
    model.config.output_attentions = True
    assert options(model) == []


def test_no_weights_are_kept_on_the_card(gpu: VirtualGPU) -> None:
    weights = BATCH * HEADS * LENGTH * LENGTH * 4
    plain = workload(LENGTH)
    saved = kept_bytes(plain) - kept_bytes(AttentionBackend().apply(plain, AttentionSetting(eager=True)))
    # The softmax of each layer goes; its output is kept by the layer after it in either case. One float a row comes.
    assert saved == LAYERS * (weights - BATCH * HEADS * LENGTH * 4)


def test_unread_weights_are_not_kept_on_the_card(gpu: VirtualGPU) -> None:
    plain = heads(length=LENGTH)
    fused = AttentionBackend().apply(plain, AttentionSetting(unread=("first", "second")))
    weights = BATCH * HEADS * LENGTH * LENGTH * 4
    assert kept_bytes(plain) - kept_bytes(fused) == 2 * (weights - BATCH * HEADS * LENGTH * 4)


def test_backends_that_were_switched_off_are_taken_on_the_card(gpu: VirtualGPU) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> int:
        before = torch.cuda.memory_allocated()
        out = model(x)
        return torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()

    model = Noting()
    x = torch.randn(BATCH, HEADS, LENGTH, WIDTH, device="cuda", requires_grad=True)
    usual = step(model, x)
    flags = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert step(model, x) > usual
        found = options(model)
        assert [setting.backends for setting in found] == [(*FUSED, SdpaName.CUDNN)]
        AttentionBackend().attach(AttachedProgram(model, None), found[0])
        assert step(model, x) == usual
    finally:
        torch.backends.cuda.enable_flash_sdp(flags[0])
        torch.backends.cuda.enable_mem_efficient_sdp(flags[1])
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_options_are_where_something_stands_in_the_way() -> None:
    assert options(gpt2()) == [AttentionSetting(eager=True)]
    assert options(gpt2("sdpa")) == []
    assert options(Heads()) == [AttentionSetting(unread=("first", "second"))]
    assert options(Heads(), trains=False) == []
    assert options(all_toys()["language-tied"].model()) == []
    setting = AttentionSetting(eager=True, backends=FUSED)
    plain = setting_to_plain(setting)
    assert plain == {"eager": True, "backends": ["flash", "efficient"]}
    assert setting_from_plain(AttentionBackend(), plain) == setting
