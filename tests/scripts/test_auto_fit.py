"""`AutoFit`: a training plans for itself when it starts, and trains with what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.scripts.test_attached_programs import CHECKPOINTED, choices_of
from torch import nn

from vramfit.errors import UsageError
from vramfit.integrations import auto_fit
from vramfit.integrations.auto_fit import AutoPlan, program_of_this_process
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.planner_job import MemoryBudget, PlanOptions
from vramfit.planner.planner_run import Planned
from vramfit.planner.plans import plan_of
from vramfit.planner.scripts.script_place import PLANNING


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], MemoryBudget, PlanOptions]]:
    """What plans were asked for; each is checkpointing of every block."""
    found: list[tuple[Sequence[str], MemoryBudget, PlanOptions]] = []

    def plan(program: Sequence[str], memory: MemoryBudget, options: PlanOptions) -> Planned:
        found.append((program, memory, options))
        figures = PlanFigures(peak_allocated_bytes=1, peak_reserved_bytes=2, total_bytes=3)
        target = PlanTarget(device="RTX 3090", budget_bytes=1 << 30)
        return Planned(plan=plan_of(choices_of(CHECKPOINTED), target, figures, figures))

    monkeypatch.setattr(auto_fit, "plan_program", plan)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    main = ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    return found


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    return model, torch.optim.SGD(model.parameters())


def test_the_plan_that_was_found_is_attached_at_the_first_step_and_undone_at_the_end(
    asked: list[tuple[Sequence[str], MemoryBudget, PlanOptions]],
) -> None:
    model, optimizer = training()
    plain = type(model[0])
    auto = AutoPlan("RTX 3090", "bitwise", 7.0)
    auto.start([optimizer])
    [(program, memory, options)] = asked
    assert tuple(program) == (__file__, "--epochs", "3")
    assert memory.gpu is not None and memory.gpu.name == "RTX 3090"
    assert (options.numerics, options.search_seconds) == ("bitwise", 7.0)
    model(torch.zeros(2, 8)).sum().backward()
    assert type(model[0]) is not plain
    auto.end()
    assert type(model[0]) is plain


def test_a_program_that_is_planned_for_does_not_plan(
    asked: list[tuple[Sequence[str], MemoryBudget, PlanOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLANNING, "1")
    auto = AutoPlan("RTX 3090", "precision", 7.0)
    auto.start([training()[1]])
    auto.end()
    assert asked == []


def test_without_a_card_one_has_to_be_named(asked: list[Any]) -> None:
    with pytest.raises(UsageError, match="there is no card here to plan for"):
        AutoPlan(None, "precision", 7.0).start([])
    assert asked == []


def test_a_notebook_has_no_program_that_could_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(UsageError, match="this process runs none"):
        program_of_this_process()
