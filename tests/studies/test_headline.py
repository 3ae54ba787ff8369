"""The headline: what fits is found by running it, layers are added to the model, and rows are kept."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import headline
import pytest
import torch
from headline import CASES, Case, Row, by_layers, by_size
from tests.planner.test_plan_objects import _plan
from torch import nn

from vramfit import Plan, Workload
from vramfit.planner.plans import PlanRequest
from vramfit.techniques import Numerics
from vramfit.units import parse_bytes


def deep(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)) for _ in range(layers))
    )


TOY = Workload(
    model=deep,
    batch=lambda batch_size: torch.ones(batch_size, 512),
    sizes={"batch_size": 1024},
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=torch.optim.AdamW,
)


def say(_text: str) -> None:
    """Nothing."""


def test_batches_grow_from_the_largest_that_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(headline.WORKLOADS, "toy", TOY)
    found = _plan(tf32={})
    found = replace(found, aim=replace(found.aim, sizes={"batch_size": 9000}))
    asked: list[PlanRequest] = []

    def search(_device: object, request: PlanRequest, _say: object) -> tuple[None, Plan]:
        asked.append(request)
        return None, found

    monkeypatch.setattr(headline, "search_for", search)
    case = Case(name="toy", grows="batch_size", budget="700MiB", start=2048, numerics="bitwise")
    row = by_size(case, say)
    limit = parse_bytes(case.budget)
    fits = [
        headline.device().step_cost(TOY, {"batch_size": size}, limit).fits
        for size in (row.plain, row.plain + 1)
    ]
    assert fits == [True, False]
    assert (row.planned, row.techniques) == (9000, tuple(choice.words for choice in found.choices))
    (request,) = asked
    assert (request.objective, request.budget_bytes, request.numerics) == (
        "batch_size",
        limit,
        Numerics.BITWISE,
    )
    assert request.sizes == {"batch_size": row.plain}


def test_models_grow_by_layers_with_the_techniques_of_their_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(headline.WORKLOADS, "toy", TOY)
    monkeypatch.setitem(headline.WORKLOADS, "gpt2", deep)
    monkeypatch.setattr(headline, "PLANS", tmp_path)
    named, half = {"modules": ["0"]}, {"master": "stochastic-rounding", "bfloat16_states": True}
    plan = _plan(micro_batching={"count": 2}, activation_checkpointing=named, low_precision_training=half)
    plan.save(tmp_path / "toy.toml")
    row = by_layers(Case(name="toy", grows="layers", budget="700MiB", start=2, numerics="precision"), say)
    assert [words.split(" ")[0] for words in row.techniques] == ["low-precision-training"]
    assert row.planned > row.plain > 2
    limit = parse_bytes("700MiB")
    fits = [
        headline.device().step_cost(headline.deep("toy", layers), {"batch_size": 1}, limit).fits
        for layers in (row.plain, row.plain + 1)
    ]
    assert fits == [True, False]


def test_rows_are_kept_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def work(case: Case, _say: object) -> Row:
        asked.append(case.name)
        return Row(
            name=case.name, grows=case.grows, budget=case.budget, plain=2, planned=7, techniques=("tf32",)
        )

    monkeypatch.setattr(headline, "KEPT", tmp_path / "build" / "rows.jsonl")
    monkeypatch.setattr(headline, "by_size", work)
    monkeypatch.setattr(headline, "by_layers", work)
    first, second = CASES[0].name, CASES[1].name
    for names, expected in (([first], [first]), ([first, second], [first, second])):
        monkeypatch.setattr(
            sys, "argv", ["headline.py", "--only", *names, "--json", str(tmp_path / "out.json")]
        )
        headline.main()
        assert asked == expected  # what is kept is not worked out again
    rows = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == [first, second]
    assert rows[0] == asdict(work(CASES[0], None)) | {"techniques": ["tf32"]}
    assert "3.5" in capsys.readouterr().out
