"""Early release: what goes, what stays for those who ask, and what is saved."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.techniques.toys import all_toys, gradients, losses
from torch import nn

from vramfit.techniques import AttachedProgram, Numerics, Profile
from vramfit.techniques.early_release import EarlyRelease, EarlyReleaseSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

BATCH, LENGTH, WIDTH, LAYERS, WORDS = 4, 256, 128, 3, 1000


@functools.cache
def _transformers() -> Any:
    return pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    """A small GPT-2 without dropout."""
    torch.manual_seed(0)
    config = _transformers().GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=4,
        vocab_size=WORDS,
        n_positions=LENGTH,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: nn.Module = _transformers().GPT2LMHeadModel(config)
    return model.train()


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, length), generator=torch.Generator().manual_seed(1))


def language() -> Workload:
    return Workload(
        model=gpt2,
        batch=lambda batch_size: tokens(16)[:batch_size],
        sizes={"batch_size": 2},
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=torch.optim.AdamW,
    )


def attached(model: nn.Module, **setting: Any) -> AttachedProgram:
    live = AttachedProgram(model, None)
    EarlyRelease().attach(live, EarlyReleaseSetting(**setting))
    return live


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Dataclass and mapping at once, as in transformers."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits", "seen"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits, seen=x)


@pytest.mark.parametrize("toy", ["language-tied", "batch-norm", "two-losses"])
def test_toys_train_the_same_bit_for_bit(toy: str) -> None:
    plain = all_toys()[toy]
    assert losses(plain, steps=4) == losses(EarlyRelease().apply(plain, EarlyReleaseSetting()), steps=4)


def test_gpt2_without_dropout_and_padding_trains_the_same_bit_for_bit() -> None:
    plain = language()
    expected = gradients(plain, steps=2)
    found = gradients(EarlyRelease().apply(plain, EarlyReleaseSetting(outputs=("logits",))), steps=2)
    assert expected and all(torch.equal(found[name], expected[name]) for name in expected)


def test_named_outputs_go_in_training_with_a_loss_and_only_then() -> None:
    model, x, labels = Scorer(), torch.ones(2, 4), torch.tensor([0, 2])
    live = attached(model, outputs=("logits",))
    output = model(x, labels)
    assert isinstance(output, Output) and list(output) == ["loss", "seen"] and output.logits is None
    assert torch.equal(output.loss, nn.functional.cross_entropy(model.head(x), labels))
    assert list(model(x)) == ["logits", "seen"]
    with torch.no_grad():
        assert list(model(x, labels)) == ["loss", "logits", "seen"]
    assert list(model.eval()(x, labels)) == ["loss", "logits", "seen"]
    model.train()
    live.undo()
    assert list(model(x, labels)) == ["loss", "logits", "seen"]


def test_caches_are_left_in_training_and_made_for_who_asks() -> None:
    model, ids = gpt2(), tokens(8)
    assert model(input_ids=ids).past_key_values is not None
    live = attached(model)
    assert model(input_ids=ids).past_key_values is None
    assert model(input_ids=ids, use_cache=True).past_key_values is not None
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert model(input_ids=ids[:, :1], past_key_values=cache).past_key_values is not None
    model.eval()
    assert model(input_ids=ids).past_key_values is not None
    expected = gpt2().eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1), expected)
    assert model.config.use_cache is True
    live.undo()
    assert model.train()(input_ids=ids).past_key_values is not None


def test_a_model_inside_another_is_found_once() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt2()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(input_ids=ids)

    model = Wrapped()
    attached(model)
    changed = [name for name, module in model.named_modules() if hasattr(type(module), "_vramfit_plain")]
    assert changed == ["inner"]
    for other in (model, copy.deepcopy(model)):
        assert other(tokens(8)).past_key_values is None


def test_names_and_pickles_stay() -> None:
    model, x, labels = Scorer(), torch.ones(2, 4), torch.tensor([0, 2])
    keys = list(model.state_dict())
    attached(model, outputs=("logits",))
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert list(torch.load(file, weights_only=False)(x, labels)) == ["loss", "seen"]


def test_the_batch_is_gone_when_the_backward_pass_begins(gpu: VirtualGPU) -> None:
    held: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = model(batch.half().float()).square().mean()
        value.register_hook(lambda _: held.append(torch.cuda.memory_allocated()))
        return value

    plain = Workload(
        model=lambda: nn.Linear(1024, 8),
        batch=lambda batch_size: torch.zeros(batch_size, 1024),
        sizes={"batch_size": 512},
        loss=loss,
        optimizer=torch.optim.SGD,
    )
    for workload in (plain, plain, EarlyRelease().apply(plain, EarlyReleaseSetting())):
        gc.collect()
        state = workload.start("cuda")
        workload.run_step(state, workload.sizes)
        del state
    # The first one made workspaces, which stay.
    assert held[1] - held[2] == 512 * 1024 * 4


def test_a_loop_that_keeps_its_outputs_holds_less_on_the_card(gpu: VirtualGPU) -> None:
    model, ids = gpt2().cuda(), tokens().cuda()

    def peak() -> int:
        for _ in range(2):
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
            del outputs
        return torch.cuda.max_memory_allocated()

    plain = peak()
    live = attached(model)
    # Keys and values of each layer are views of one projection, and were copied into the cache.
    assert plain - peak() == LAYERS * 2 * BATCH * LENGTH * WIDTH * 4
    live.undo()
    attached(model, caches=False, outputs=("logits",))
    assert plain - peak() == BATCH * LENGTH * WORDS * 4


def test_options_are_where_something_could_go() -> None:
    technique = EarlyRelease()

    def found(model: nn.Module, inputs: int = 0, **facts: Any) -> list[EarlyReleaseSetting]:
        known = {"trains": True} | facts
        profile = Profile(model=model, optimizer=None, sizes={}, categories={"inputs": inputs}, **known)
        return list(technique.options(profile))

    batch, caches = EarlyReleaseSetting(caches=False), EarlyReleaseSetting()
    assert found(gpt2()) == [caches]
    assert found(gpt2(), 2 << 20) == [batch, caches]
    assert found(gpt2(), trains=False) == found(Scorer()) == []
    assert found(Scorer(), 2 << 20) == [batch]
    assert found(Scorer(), 2 << 20, own_step=True) == []
    assert technique.promise(batch).numerics is Numerics.BITWISE
    assert technique.promise(caches).numerics is Numerics.ROUNDING
