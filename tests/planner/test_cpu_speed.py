"""One guess of how fast a CPU is, for all who need one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vramfit.planner import planner_run, trial_attempts
from vramfit.planner.devices import cpu_backend
from vramfit.planner.plan_file import PlanFigures, PlanTarget, write_plan
from vramfit.planner.plans import Plan
from vramfit.planner.verification import ValuesCheck
from vramfit.planner.verify_questions import PlanValuesQuestion
from vramfit.workload import Workload

_STEP = 6_000_000_000


def test_a_trial_is_as_small_as_the_speed_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch_size": 4, "sequence_length": 64}
    seconds, flops = 30.0, 2 * 30.0 * cpu_backend.CPU_FLOPS
    workload = Workload(
        model=lambda: nn.Linear(1, 1),
        batch=lambda batch_size, sequence_length: torch.ones(batch_size, sequence_length, 1),
        loss=lambda model, batch: model(batch).mean(),
        sizes=sizes,
    )

    def length() -> int:
        ways = trial_attempts.ways_to_try(
            workload, sizes, flops=flops, seconds=seconds, model_bytes=1, most_bytes=1 << 30
        )
        return next(ways).sizes["sequence_length"]

    assert length() == 32
    monkeypatch.setattr(cpu_backend, "CPU_FLOPS", cpu_backend.CPU_FLOPS / 2)
    assert length() == 16


def test_a_verification_reckons_with_the_same_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = PlanFigures(peak_allocated_bytes=1, peak_reserved_bytes=1, total_bytes=1, step_flops=_STEP)
    plan = Plan(entries=(), aim=PlanTarget(device="CPU", budget_bytes=1 << 30), before=figures, after=figures)
    write_plan(tmp_path / "plan.toml", plan)
    (tmp_path / "work.py").write_text("")
    questions = []

    def ask(question: PlanValuesQuestion, *_about: object, progress: object) -> ValuesCheck:
        questions.append(question)
        return ValuesCheck(sizes={}, skipped="nothing ran")

    monkeypatch.setattr(planner_run, "ask", ask)
    planner_run.verify_in_child(
        tmp_path / "plan.toml", planner_run.VerifyOptions(memory=False), target=f"{tmp_path}/work.py:w"
    )
    assert questions[0].step_seconds == cpu_backend.cpu_seconds(_STEP) == _STEP / cpu_backend.CPU_FLOPS
