"""Encoders in pieces under a contrastive loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.planner.test_whole_and_pieces import CoupledInTraining, workload
from tests.techniques.toys import Block, gradients
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.plans import PlanRequest
from vramfit.planner.whole_and_pieces import NoPiecesError, try_encoders, try_pieces
from vramfit.techniques import AttachedProgram, gradient_caching, with_choices
from vramfit.techniques.core.technique import Choice
from vramfit.techniques.gradient_caching import GradientCaching, GradientCachingSetting, InPieces
from vramfit.workload import Batch, Workload


def clip(layers: int = 1, width: int = 16) -> Workload:
    """CLIP with its own loss and dropout on attention."""
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 2, "attention_dropout": 0.2}
    config = transformers.CLIPConfig(
        text_config=common | {"vocab_size": 64, "eos_token_id": 63},
        vision_config=common | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    )

    def batch(batch_size: int) -> dict[str, Any]:
        return {
            "input_ids": torch.randint(62, (batch_size, 6)),
            "pixel_values": torch.randn(batch_size, 3, 16, 16),
        }

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = transformers.CLIPModel(config)
        return made.train()

    return Workload(
        model=model,
        batch=batch,
        sizes={"batch_size": 6},
        loss=lambda model, batch: model(**batch, return_loss=True).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def info_nce(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Two views of each example, each against all others (SimCLR)."""
    one, other = (F.normalize(model(view).mean(1)) for view in batch)
    return F.cross_entropy(one @ other.T * 5, torch.arange(len(one), device=one.device))


def _cached(asked: Workload, count: int, *modules: str) -> Workload:
    setting = GradientCachingSetting(count=count, modules=modules)
    return GradientCaching().apply(asked, setting)


@pytest.mark.parametrize(("layers", "width", "count"), [(1, 16, 2), (3, 32, 4), (1, 16, 6)])
def test_gradients_of_clip_are_those_of_the_whole_batch(layers: int, width: int, count: int) -> None:
    asked = clip(layers, width)
    for config in (asked.model().config.text_config, asked.model().config.vision_config):  # type: ignore[union-attr]
        assert config.attention_dropout == 0.2  # type: ignore[union-attr]
    found = try_encoders(asked)
    assert found.modules == ("text_model", "vision_model")
    with pytest.raises(NoPiecesError):
        try_pieces(asked)
    plain = _silent(asked)
    expected, cached = gradients(plain), gradients(_cached(plain, count, *found.modules))
    assert expected.keys() == cached.keys()
    assert found.parameters == len(expected)
    whole = max(float(one.norm()) for one in expected.values())
    for name, one in expected.items():
        assert float((cached[name] - one).norm()) <= 1e-4 * float(one.norm()) + 1e-6 * whole, name


def _silent(asked: Workload) -> Workload:
    """Without dropout: pieces draw other numbers than the whole batch."""

    def model() -> nn.Module:
        made = asked.model()
        for module in made.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
        return made

    return Workload(
        model=model, batch=asked.batch, sizes=asked.sizes, loss=asked.loss, optimizer=asked.optimizer
    )


@pytest.mark.parametrize("kind", ["clip", "views"])
def test_with_dropout_the_second_run_draws_what_the_first_did(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = clip() if kind == "clip" else _views()
    modules = try_encoders(asked).modules
    cached = gradients(_cached(asked, 3, *modules))
    # The same pieces in one graph, without a second run.
    monkeypatch.setattr(gradient_caching, "checkpoint", lambda call, *leaves, use_reentrant: call(*leaves))
    expected = gradients(_cached(asked, 3, *modules))
    assert expected.keys() == cached.keys()
    for name, one in expected.items():
        torch.testing.assert_close(cached[name], one, rtol=1e-5, atol=1e-7)
    silent = gradients(_silent(asked)) if kind == "clip" else {}
    assert all(not torch.allclose(cached[name], one) for name, one in silent.items() if one.norm() > 1e-2)


def _views() -> Workload:
    def pair(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch_size, 5, 32), torch.randn(batch_size, 5, 32)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(dropout=0.3), Block(dropout=0.3))

    return Workload(
        model=model,
        batch=pair,
        sizes={"batch_size": 6},
        loss=info_nce,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def test_a_model_that_is_its_own_encoder_is_found() -> None:
    assert try_encoders(_views()).modules == ("",)


class Routed(nn.Module):
    """An encoder whose router is kept balanced over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x.mean(1)).softmax(-1)
        return self.body(x) + (shares / shares.mean(0))[:, None]


@pytest.mark.parametrize("model", [Routed, CoupledInTraining])
def test_an_encoder_that_couples_examples_is_none(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(NoPiecesError, match="no part of the model gives the same gradients in pieces"):
        try_encoders(workload(info_nce, lambda: nn.Sequential(model())))
    parts = try_encoders(
        workload(info_nce, model)
    ).modules  # they do not: what couples examples lies between them
    assert parts == tuple(name for name, _ in model().named_children())


def test_what_cannot_be_put_together_is_refused() -> None:
    live = AttachedProgram(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), None)
    choice = Choice(technique=GradientCaching(), setting=GradientCachingSetting())
    with pytest.raises(UsageError, match="the model has batch norm"):
        live.attach((choice,))
    around, one = InPieces("encoder", 2), nn.Linear(4, 4)
    x = torch.ones(4, 4)
    for bad, message in (
        (lambda x: x.sum(), r"encoder gives a tensor of shape \[\] for 2 examples"),
        (lambda x: (x, {1}), "encoder gives a set"),
    ):
        with pytest.raises(UsageError, match=message):
            around(one, bad, (x.requires_grad_(),), {})
    found = around(one, lambda x, scale: {"all": (x * scale, None), "name": "y"}, (x,), {"scale": 2.0})
    assert torch.equal(found["all"][0], 2 * x)
    assert (found["all"][1], found["name"]) == (None, "y")
    with torch.no_grad():
        assert around(one, torch.sum, (x,), {}) == 16
    with pytest.raises(UsageError, match="a loss that compares examples has no pieces"):
        with_choices(_cached(_views(), 2), (_micro(),))


def _micro() -> Choice:
    from vramfit.techniques import find_technique, setting_from_plain

    technique = find_technique("micro-batching")
    return Choice(technique=technique, setting=setting_from_plain(technique, {}))


class Counting(nn.Linear):
    """An encoder that counts its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x)


def test_an_encoder_that_writes_is_refused() -> None:
    model = nn.Sequential(Counting())
    live = AttachedProgram(model, None)
    live.attach((Choice(technique=GradientCaching(), setting=GradientCachingSetting(modules=("0",))),))
    with pytest.raises(
        UsageError, match="0 writes runs in its forward pass, and pieces of a batch would write it"
    ):
        model(torch.ones(4, 4))
    live.undo()


def test_a_plan_caches_gradients_where_the_loss_has_no_pieces() -> None:
    def pair(batch_size: int) -> Batch:
        return torch.randn(batch_size, 64, 32), torch.randn(batch_size, 64, 32)

    asked = Workload(
        model=lambda: nn.Sequential(*(Block() for _ in range(2))),
        batch=pair,
        sizes={"batch_size": 512},
        loss=info_nce,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    device = VirtualBackend(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 30)
    plain = device.step_cost(asked, dict(asked.sizes))
    request = PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=plain.total_bytes - plain.peak_allocated_bytes // 2,
        allowed=frozenset({"micro-batching", "gradient-caching"}),
        entries=False,
    )
    _, plan = promised_plan(device, request, lambda _text: None)
    assert [choice.name for choice in plan.choices] == ["gradient-caching"]
    assert plan.after.peak_allocated_bytes < plain.peak_allocated_bytes / 2
    told = " ".join(plan.notes)
    assert "micro-batching is left out: pieces of a batch of 4 do not give its gradients" in told
    assert "the model may run in pieces (gradient-caching): tried with the model itself" in told
    assert "examples: the gradients of all 24 parameters differ by at most" in told
    assert plan.compared is not None
    assert plan.compared.startswith("the model itself and ")
