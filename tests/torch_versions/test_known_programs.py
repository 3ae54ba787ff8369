"""A program of each kind runs with this torch, and takes the bytes that are known for its release."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.torch_versions.known_bytes import CHANGES, KNOWN, known, other_versions
from tests.torch_versions.programs import CASES, EXAMPLES, LIBRARIES, missing

pytestmark = pytest.mark.torch_versions

RUNS = Path(__file__).parents[1] / "examples" / "framework_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs, run one after the other in one interpreter, left their reports."""
    folder = tmp_path_factory.mktemp("programs")
    waiting = [{**case, "name": name} for name, case in CASES.items() if not missing(name)]
    while waiting:
        errors = run_programs(waiting, folder)
        waiting = [case for case in waiting if not (folder / f"{case['name']}.json").exists()]
        if waiting:  # one has ended the interpreter
            (folder / f"{waiting.pop(0)['name']}.errors").write_text(errors, encoding="utf-8")
    return folder


def run_programs(cases: list[dict[str, Any]], folder: Path) -> str:
    """Run programs until one ends the interpreter; returns how that went."""
    given = folder / "cases"
    given.write_text(json.dumps(cases), encoding="utf-8")
    command = [sys.executable, str(RUNS), str(given), str(folder)]
    done = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    return f"the interpreter ended with exit code {done.returncode}\n{done.stderr[-3000:]}"


def report(folder: Path, name: str) -> dict[str, Any]:
    """What a program left; skips where it needs a library that is not here."""
    if lacking := missing(name):
        pytest.skip(f"{', '.join(lacking)} is not installed")
    if (errors := folder / f"{name}.errors").exists():
        pytest.fail(errors.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    if error := found["traceback"]:
        pytest.fail(f"{error.strip().splitlines()[-1]}\n{error}")
    return found


def same_libraries(name: str) -> None:
    """Skip where libraries are others than those with which a program's bytes are known."""
    if others := other_versions(LIBRARIES.get(name, ())):
        pytest.skip(f"other versions are other programs: {', '.join(others)}")


@pytest.mark.parametrize("name", CASES)
def test_a_program_runs_to_its_end(folder: Path, name: str) -> None:
    run = report(folder, name)
    assert run["fits"] is True and run["oom"] is None
    assert sum(run["categories"].values()) == run["peak"]["allocated_bytes"] > 0
    codes = {warning["code"] for warning in run["warnings"]}
    assert "op-without-rule" not in codes


@pytest.mark.parametrize("name", CASES)
def test_it_takes_what_is_known(folder: Path, name: str) -> None:
    run = report(folder, name)
    same_libraries(name)
    peak = run["peak"]
    assert (peak["allocated_bytes"], peak["reserved_bytes"]) == known(name)


def test_a_recording_has_the_lines_of_the_program(folder: Path) -> None:
    assert "entries from main: True\n" in report(folder, "snapshot")["output"]


def test_a_replay_takes_no_new_memory(folder: Path) -> None:
    assert "replays took 0.00 MiB more" in report(folder, "cuda-graph")["output"]


def test_the_stages_of_a_pipeline_take_what_is_known(tmp_path: Path) -> None:
    if lacking := missing("pipeline"):
        pytest.skip(f"{', '.join(lacking)} is not installed")
    options = ("--gpu", "H100", "--alloc-conf", "expandable_segments:True", "--json", "report.json")
    torchrun = ("--", "torchrun", "--nproc-per-node", "2", str(EXAMPLES / "parallel" / "pipeline_llama.py"))
    given = "--size tiny --seq-len 128 --steps 2 --micro-batches 4"
    line = [sys.executable, "-m", "vramfit", "run", *options, *torchrun, *given.split()]
    done = warm.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["ranks"]
    same_libraries("pipeline")
    peaks = [(rank["peak"]["allocated_bytes"], rank["peak"]["reserved_bytes"]) for rank in ranks]
    assert peaks == [known("first stage"), known("last stage")]


def test_every_change_of_bytes_is_named() -> None:
    for program, figures in KNOWN.items():
        releases = sorted(figures)
        assert all(since in CHANGES for since in releases[1:]), program
        for before, since in pairwise(releases):
            assert figures[before] != figures[since], f"{program}: nothing changes with {since}"
