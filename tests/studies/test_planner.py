"""The planner's times: what a plan tells is read, goals that are missed are told, and a case that fails says why."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planner_parts import workloads
from rich.console import Console
from tests import warm

import planner
from planner import CASES, WORKLOADS, Case, planned, row_of, table
from vramfit import Workload

CASE = Case(name="training", gpu="RTX 4090", budget="2GiB")


def _plan(**solved: Any) -> dict[str, Any]:
    figures = {"runs": 3, "gap": 0.01, "search_seconds": 50.0, "first_plan_seconds": 20.0}
    return {
        "fits": True,
        "solved": figures | solved,
        "after": {"total_bytes": 1 << 30, "step_seconds": 0.5},
        "techniques": [{"name": "chunked-loss"}],
    }


@pytest.mark.parametrize(
    ("plan", "end", "good"),
    [
        (_plan(), 100.0, True),
        (_plan(), 301.0, False),
        (_plan(first_plan_seconds=61.0), 100.0, False),
        (_plan() | {"fits": False}, 100.0, False),
    ],
)
def test_goals_are_a_plan_soon_and_the_end_in_time(plan: dict[str, Any], end: float, good: bool) -> None:
    row = row_of(CASE, plan, end, 2.0)
    assert row.within_goals == good
    shown = io.StringIO()
    Console(file=shown, width=200).print(table([row]))
    assert "1.00%" in shown.getvalue()
    assert ("nothing fits" if not plan["fits"] else "chunked-loss") in shown.getvalue()


def test_a_case_is_planned_for_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "work.py"
    file.write_text(
        "import torch\nfrom vramfit import Workload\n"
        "training = Workload(model=lambda: torch.nn.Linear(64, 64), batch=lambda batch_size: "
        "torch.ones(batch_size, 64), sizes={'batch_size': 4}, loss=lambda model, batch: model(batch).mean(), "
        "optimizer=lambda parameters: torch.optim.AdamW(parameters))\n"
    )
    monkeypatch.setattr(planner, "WORKLOADS", file)
    monkeypatch.setattr(planner, "CASES", (CASE,))
    stand_in = SimpleNamespace(run=warm.run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(planner, "subprocess", stand_in)
    out = tmp_path / "rows.json"
    assert planner.main(["--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert 0 < row["first"] < row["end"]
    assert row["cpu"] > 0
    assert (
        planner.main(["--after", str(out), "--before", str(out), "--write", str(tmp_path / "page.md")]) == 0
    )
    page = (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[2] for line in page if line.startswith("| ")] == ["", "before", "now"]
    monkeypatch.setattr(planner, "WORKLOADS", tmp_path / "none.py")
    missing = planned(CASE)
    assert "there is no file" in missing.failed
    assert not missing.within_goals


@pytest.mark.parametrize("name", sorted({case.name for case in CASES}))
def test_all_cases_are_workloads_whose_batches_can_be_made(name: str) -> None:
    workload = getattr(workloads, name)
    assert isinstance(workload, Workload)
    assert WORKLOADS.exists()
    with torch.device("meta"):
        assert workload.batch(**dict.fromkeys(workload.sizes, 2)) is not None
