"""Whether batches are cut, by trying the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner import micro_batch_trial, trial_attempts
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.micro_batch_trial import try_micro_batching
from vramfit.planner.plans import PlanRequest
from vramfit.techniques import Numerics, Profile
from vramfit.techniques.micro_batching import MicroBatching, Reduction
from vramfit.workload import Batch, Workload


def _profile(workload: Workload, *, flops: int = 0) -> Profile:
    return Profile(
        model=workload.model(), optimizer=None, sizes=workload.sizes, trains=True, step_flops=flops
    )


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each example against all others of the batch."""
    found = F.normalize(model(batch[0] if isinstance(batch, tuple) else batch).flatten(1))
    return F.cross_entropy(found @ found.T, torch.arange(len(found), device=found.device))


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0] if isinstance(batch, tuple) else batch).square().sum()


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(None, Reduction.TOKENS), (summed, Reduction.SUM), (contrastive, None)],
    ids=["mean", "sum", "contrastive"],
)
def test_a_loss_is_tried_and_what_was_tried_is_said(loss: object, reduction: Reduction | None) -> None:
    toy = all_toys()["mlp"]
    workload = toy if loss is None else replace(toy, loss=loss)  # type: ignore[arg-type]
    found = try_micro_batching(workload, _profile(workload))
    assert (found.setting and found.setting.reduction) is reduction
    if reduction is None:
        assert "micro-batching is left out: pieces of a batch of 4 do not give its gradients" in found.note
    else:
        size = toy.sizes["batch_size"]
        assert f"was tried with the model itself: pieces of {size} examples give the gradients" in found.note


class Tall(nn.Module):
    """Many layers that are alike, and batches of any length."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.last = nn.Linear(32, 8)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def _tall(loss: object = None) -> Workload:
    return Workload(
        model=Tall,
        batch=lambda batch_size, length: torch.randn(batch_size, length, 8),
        sizes={"batch_size": 16, "length": 1024},
        loss=loss or (lambda model, batch: model(batch).square().mean()),  # type: ignore[arg-type]
    )


def test_a_batch_that_would_take_long_is_tried_at_smaller_sizes() -> None:
    workload = _tall()
    found = try_micro_batching(workload, _profile(workload, flops=10 * 10**12))
    assert found.setting is not None
    assert "tried with the model itself at length 16:" in found.note


@pytest.mark.parametrize("coupled", [False, True])
def test_a_model_that_is_too_large_is_tried_by_a_stand_in(
    coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = _tall(contrastive if coupled else None)
    large = sum(parameter.numel() * 4 for parameter in workload.model().parameters())
    monkeypatch.setattr(micro_batch_trial, "_MOST", large // 2)
    monkeypatch.setattr(trial_attempts, "_LARGE", 500)  # so that weights are made without values
    found = try_micro_batching(workload, _profile(workload))
    assert (found.setting is None) is coupled
    said = "micro-batching is left out" if coupled else "a stand-in of the same code with 2 of 12 layers"
    assert said in found.note


def test_what_was_not_tried_is_left_out_unless_it_is_allowed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(all_toys()["mlp"], loss=contrastive)
    monkeypatch.setattr(micro_batch_trial, "_MOST", 0)
    found = try_micro_batching(workload, _profile(workload))
    assert (found.setting, found.known) == (None, False)
    assert "was not tried, since the model is too large for it here; it is left out" in found.note
    named = try_micro_batching(workload, _profile(workload), by_name=True)
    assert named.setting is not None
    assert named.setting.reduction is Reduction.AUTO
    assert MicroBatching().promise(named.setting).numerics is Numerics.APPROXIMATE
    assert "nothing is promised of it, and it is used under --numerics approximate alone" in named.note


def test_a_model_of_transformers_is_made_narrower() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=50,
    )
    workload = replace(_tall(), model=lambda: transformers.LlamaForCausalLM(config))
    makers = list(trial_attempts.stand_in(workload, 1 << 20))
    assert [words for _, words in makers] == [
        "a stand-in of the same code with 2 of 6 layers",
        "a stand-in of the same code with at most 2 layers and widths divided by 4",
    ]
    model = makers[1][0]()
    assert (model.config.hidden_size, model.config.num_key_value_heads) == (16, 1)
    assert len(model.model.layers) == 2
    assert (config.hidden_size, len(workload.model().model.layers)) == (64, 6), "the user's is as it was"


class Around(nn.Module):
    """What people put around a model, and into it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        model.decoder.block[0].layer[0].SelfAttention.q = nn.Sequential(
            model.decoder.block[0].layer[0].SelfAttention.q, nn.LayerNorm(8)
        )


def test_what_lies_around_a_narrower_model_is_there_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=64,
        d_kv=8,
        d_ff=128,
        num_layers=6,
        num_heads=8,
        vocab_size=50,
        feed_forward_proj="relu",
        decoder_start_token_id=0,
    )
    workload = replace(_tall(), model=lambda: Around(transformers.T5ForConditionalGeneration(config)))
    (make, words), *_ = list(trial_attempts.stand_in(workload, 1 << 18))
    assert words == "a stand-in of the same code with at most 2 layers and widths divided by 8"
    model: Any = make()
    assert type(model) is Around
    assert len(model.model.encoder.block) == len(model.model.decoder.block) == 2
    assert model.config.d_model == model.model.shared.embedding_dim == 8, (
        "copies of a config are narrowed once"
    )
    assert (config.d_model, config.num_layers, config.num_decoder_layers) == (64, 6, 6)
    assert not hasattr(config, "_vramfit_narrow")
    out = model.model(input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2, 4, dtype=torch.long))
    assert out.logits.shape == (2, 4, 50)


@pytest.mark.parametrize("loss", [None, contrastive])
def test_only_what_can_be_cut_is_offered_in_pieces(loss: object) -> None:
    toy = all_toys()["mlp"]
    workload = replace(
        toy if loss is None else replace(toy, loss=loss),  # type: ignore[arg-type]
        optimizer=lambda parameters: torch.optim.SGD(_list(parameters), lr=0.1),
    )
    request = PlanRequest(
        workload=workload, sizes=workload.sizes, budget_bytes=1 << 33, allowed=frozenset({"micro-batching"})
    )
    candidates = Candidates(device=VirtualBackend(find_gpu("RTX 4090"), alloc_conf=""), request=request)
    offered = list(candidates.options(candidates.plain))
    assert bool(offered) == (loss is None)
    assert all("micro-batching" in note for note in candidates.notes(offered))
    assert candidates.notes(offered)
    # Labels may be ignored in a mean of one for each example.
    assert all(choice.setting.reduction is Reduction.TOKENS for choice in offered)  # type: ignore[attr-defined]


def _list(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(parameters)
