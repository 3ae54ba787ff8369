"""The plans under examples/plans: each read, applied and run on the virtual GPU that it is for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.virtual.conftest import fit_interpreter

from vramfit.planner.plans import Plan
from vramfit.report import render

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
import example_plans

__all__ = ["fit_interpreter"]

FOLDER = Path(__file__).parents[2] / "examples" / "plans"
GIB = 1 << 30
BUDGETS = {"llama_7b": 24 * GIB, "bert_large": 12 * GIB, "unet_3d": 18 * GIB, "gpt2_xl": 16 * GIB}


def test_there_is_a_plan_for_each_workload() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(BUDGETS)


@pytest.mark.parametrize("name", BUDGETS)
def test_its_table_stands_in_the_readme(name: str) -> None:
    """With VRAMFIT_UPDATE_GOLDEN=1 it is written there instead."""
    table = render(Plan.load(FOLDER / f"{name}.toml"), width=100)
    shown = "".join(f"    {line}".rstrip() + "\n" for line in table.splitlines())
    readme = FOLDER / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, found, rest = text.partition(f"<!-- {name} -->\n")
    assert found, f"no place for {name} in the README"
    known, end, after = rest.partition("<!-- end -->\n")
    if os.environ.get("VRAMFIT_UPDATE_GOLDEN") == "1":
        readme.write_text(f"{before}{found}\n{shown}\n{end}{after}", encoding="utf-8")
        return
    assert known == f"\n{shown}\n"


@pytest.mark.parametrize("name", BUDGETS)
def test_it_is_made_for_its_workload(name: str) -> None:
    plan = Plan.load(FOLDER / f"{name}.toml")
    assert plan.aim.target == f"examples/plans/workloads.py:{name}"
    assert plan.aim.sizes == example_plans.workload_of(name).sizes
    assert plan.aim.budget_bytes == BUDGETS[name]
    assert plan.before.total_bytes > plan.aim.budget_bytes
    assert plan.numerics <= plan.aim.numerics
    assert plan.after.host_bytes <= plan.aim.host_budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUDGETS if name != "gpt2_xl"])
def test_a_plan_keeps_its_word(name: str) -> None:
    """That of GPT-2 XL takes minutes: studies/example_plans.py runs it."""
    after, cost = Plan.load(FOLDER / f"{name}.toml").after, example_plans.cost_of(name)
    assert cost.fits
    assert cost.peak_allocated_bytes == after.peak_allocated_bytes
    assert cost.total_bytes == after.total_bytes
    assert cost.host_bytes == after.host_bytes
