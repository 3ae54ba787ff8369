"""Plans on a card, with the virtual GPU in its place: the machinery, not the figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import plans_on_card
import pytest
import torch
from plans_on_card import Case, Row, fully_checkpointed, measure_all, table
from tests import warm
from tests.cli.test_plan import WORKLOADS

import vramfit
from vramfit.gpus import find_gpu

CARD = find_gpu("RTX 4090")
ROW = Row(
    name="a",
    card="a card",
    budget=1 << 30,
    planned_bytes=900 << 20,
    measured_bytes=901 << 20,
    peak_error=0.002,
    fits=True,
    planned_seconds=1.0,
    measured_seconds=1.1,
    full_bytes=800 << 20,
    full_seconds=1.3,
    techniques=("tf32",),
)


@pytest.mark.slow
def test_a_plan_is_measured_beside_full_checkpointing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "workloads.py", tmp_path / "rows.json"
    file.write_text(WORKLOADS)
    case = Case(name="toy", target=f"{file}:training", budget=600 << 20, numerics="bitwise")
    (tmp_path / "rtx-4090").mkdir()
    # A quick search: the benchmark finds the plan and takes it as it is.
    plan = vramfit.plan(
        case.target, gpu=CARD, budget=case.budget, numerics="bitwise", allow=["activation-checkpointing"]
    )
    plan.save(tmp_path / "rtx-4090" / "toy.toml")
    code = measure_all([case], CARD, tmp_path, virtual=True, out=out)
    told = json.loads(out.read_text())
    (row,) = told["rows"]
    assert told["virtual"]
    assert row["fits"]
    assert row["measured_bytes"] == row["planned_bytes"] <= 600 << 20
    assert row["peak_error"] == 0
    assert 0 < row["full_bytes"] <= row["measured_bytes"]
    assert row["measured_seconds"] <= row["full_seconds"]
    assert row["holds"]
    assert code == 0
    printed = capfd.readouterr().out
    assert "in the place of a card: no evidence" in printed
    assert "| toy | 600.00 MiB |" in printed
    full = fully_checkpointed(plan)
    assert [choice.words for choice in full.choices] == ["activation-checkpointing (whole)"]


def test_a_row_holds_only_as_a_whole() -> None:
    assert ROW.holds
    assert not replace(ROW, fits=False).holds
    assert not replace(ROW, peak_error=-0.011).holds
    assert not replace(ROW, full_seconds=1.0).holds
    assert replace(ROW, full_seconds=0.0).holds
    assert table([ROW]).splitlines()[2].endswith("| 1.300 s, 800.00 MiB | yes |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_so() -> None:
    done = warm.run([sys.executable, plans_on_card.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("PyTorch sees no CUDA card on this machine, so no plan can be run on one.")
