"""Random budgets are honoured on the CPU, and the study that says so can tell when one is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

ROOT = Path(__file__).parents[2]
SAMPLE = [9]
"""A pair of the quickest, a graph network; `make studies` tries a hundred."""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, ROOT / "studies" / "budgets.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a pair comes to."""
    file: Path = tmp_path_factory.mktemp("budgets") / "results.jsonl"
    done = run("--only", *SAMPLE, "--results", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SAMPLE)} of {len(SAMPLE)} budgets honoured" in done.stdout
    return file


def kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_budget_is_honoured(results: Path) -> None:
    for result in kept(results):
        assert result["measured_bytes"] <= result["budget_bytes"] < result["plain_bytes"], result
        assert result["low_bytes"] < result["budget_bytes"]
        assert result["measured_bytes"] == max(result["start_bytes"], *result["step_bytes"])
        # The meter follows tensors in blocks of 512 bytes, and not what kernels allocate for themselves.
        assert 0.5 < result["metered_bytes"] / result["measured_bytes"] < 1.1
        assert "[[technique]]" in result["plan"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped_and_writes_the_page(results: Path, tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    others = [r | {"number": n} for n, r in zip(range(10), kept(results) * 10, strict=False)]
    lines = [json.dumps(r) for r in others]
    file.write_text("\n".join([*lines, '{"seed": 0, "numb']), encoding="utf-8")
    done = run("--count", 10, "--results", file, "--write", page)
    assert done.returncode == 0, done.stderr
    assert "10 of 10 budgets honoured" in done.stdout
    assert "**10 of 10 budgets honoured" in page.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").count("| honoured |") == 11  # each pair, and a column's head


def test_without_its_plan_a_program_exceeds_the_budget(results: Path) -> None:
    (planned,) = (result for result in kept(results) if result["number"] == 9)
    plain = planned | {"measured_bytes": planned["plain_bytes"]}
    from random_budgets.table import Outcome, outcome, summary

    assert outcome(planned) is Outcome.HONOURED
    assert outcome(plain) is Outcome.EXCEEDED
    assert outcome(planned | {"fits": False}) is Outcome.NOTHING_FITS
    assert outcome(planned | {"error": "RuntimeError: no"}) is Outcome.FAILED
    assert summary([planned, plain]) == "1 of 2 budgets honoured, 1 exceeded, 0 nothing fits, 0 failed"


def test_pairs_are_drawn_alike_each_time_and_of_ten_architectures() -> None:
    from random_budgets.pairs import draw

    pairs = [draw(7, number) for number in range(100)]
    assert pairs == [draw(7, number) for number in range(100)]
    assert {pair.architecture for pair in pairs[:10]} == {pair.architecture for pair in pairs}
    assert len({pair.architecture for pair in pairs}) == 10
    assert {pair.numerics for pair in pairs} == {"bitwise", "rounding"}
    assert all(100 < pair.budget(100, 1000) < 1000 for pair in pairs)
    assert draw(8, 0) != draw(7, 0)


def test_the_peak_is_read_from_the_profiler() -> None:
    from random_budgets.trial import _STEP, _peaks
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        held = torch.empty(1000, dtype=torch.uint8)
        for size in (3000, 2000):
            with record_function(_STEP):
                torch.empty(size, dtype=torch.uint8)
    found = _peaks(profiler.profiler.kineto_results.experimental_event_tree())
    base = found["start_bytes"] - held.nbytes  # of earlier profiles of this process
    assert [found["measured_bytes"] - base, *(step - base for step in found["step_bytes"])] == [
        4000,
        4000,
        3000,
    ]


def test_an_unknown_architecture_is_a_usage_error() -> None:
    done = run("--only", "nonesuch")
    assert done.returncode == 2
    assert "nonesuch" in done.stderr
    assert "mixtral" in done.stderr
