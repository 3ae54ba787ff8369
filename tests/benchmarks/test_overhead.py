"""The benchmark of recording runs both ways and tells what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, ROOT / "benchmarks" / "overhead.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_it_measures_both_ways(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    done = run("--device", "cpu", "--pairs", 2, "--only", "tiny ops", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "tiny ops" in done.stdout and "quartiles" in done.stdout
    told = json.loads(file.read_text())
    (loop,) = told["loops"]
    assert told["schema"] == "vramfit.overhead/1" and loop["pairs"] == 2
    assert loop["events"] > 500, "a step of this loop makes hundreds of events"
    assert loop["recorded_ms"] > 0 and loop["step_ms"] > 0 and loop["low"] <= loop["high"]


def test_it_measures_a_plan_that_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    done = run("--of", "attaching", "--device", "cpu", "--pairs", 2, "--only", "tiny ops", "--json", file)
    assert done.returncode in (0, 1), done.stderr  # the ratio of two pairs says nothing
    told = json.loads(file.read_text())
    assert told["of"] == "attaching" and told["loops"][0]["recorded_ms"] > 0
    assert "What attaching costs" in done.stdout


def test_what_it_cannot_do_is_said() -> None:
    done = run("--device", "cpu", "--only", "huge")
    assert done.returncode == 2 and "no loop 'huge'" in done.stderr and "tiny ops" in done.stderr
