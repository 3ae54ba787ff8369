"""`vramfit run --against`: exit codes, bad input, and what reaches the report."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.reconciling import predicted, training
from analysis.synthetic import fitting_run, oom_run
from cli.conftest import FakeRunner, Invocation
from vramfit.trace import Run, write_snapshot

Command = Callable[..., Invocation]
PROGRAM = training(layers=3)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.fixture
def snapshot(tmp_path: Path, runner: FakeRunner) -> Path:
    """A recording of the program that the runner will predict."""
    runner.result = predicted(PROGRAM)
    path = tmp_path / "card.pickle"
    write_snapshot(runner.result.trace, path)
    return path


@pytest.fixture
def figures(tmp_path: Path, runner: FakeRunner) -> Path:
    """Figures of a run that reserved 10 MiB more than the prediction does."""
    runner.result = predicted(PROGRAM)
    path = tmp_path / "card.json"
    reserved = runner.result.devices[0].peak_reserved_bytes + (10 << 20)
    path.write_text(json.dumps({"max_memory_reserved": reserved}))
    return path


def test_a_run_as_recorded_ends_well(vramfit: Command, script: Path, snapshot: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--against", snapshot, "--tolerance", "0%", script)
    assert found.code == 0
    assert "✓ equal to card.pickle to the byte" in found.out
    assert found.out.startswith("✓ fits RTX 4090")
    assert found.err == ""


@pytest.mark.parametrize(
    ("tolerance", "code"), [("1%", 3), ("9MiB", 3), ("10MiB", 0), ("20 %", 0), ("0%", 3)]
)
def test_a_difference_beyond_the_tolerance_ends_with_3(
    vramfit: Command, script: Path, figures: Path, tolerance: str, code: int
) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--against", figures, "--tolerance", tolerance, script)
    assert found.code == code
    assert ("✗ differs from card.json" if code else "✓ agrees with card.json") in found.out


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (replace(fitting_run(), exit_code=1, error="ValueError"), 1),
        (replace(fitting_run(), exit_code=42), 42),
        (replace(fitting_run(), exit_code=-11), 139),
        (oom_run(), 3),
        (oom_run(handled=True, exit_code=7), 7),
        (oom_run(handled=True, exit_code=0), 3),
        (fitting_run(), 3),
    ],
)
def test_the_programs_own_failure_comes_first(
    vramfit: Command, runner: FakeRunner, script: Path, figures: Path, run: Run, code: int
) -> None:
    runner.result = run
    found = vramfit("run", "--gpu", "RTX 4090", "--against", figures, script)
    assert found.code == code
    assert "✗ differs from card.json" in found.out


def test_the_comparison_is_in_the_json(
    vramfit: Command, script: Path, snapshot: Path, tmp_path: Path
) -> None:
    (tmp_path / "more.json").write_text(json.dumps({"outside_bytes": "450MiB"}))
    found = vramfit(
        "run",
        "--gpu",
        "RTX 4090",
        "--against",
        snapshot,
        "--against",
        tmp_path / "more.json",
        "--json",
        "-",
        script,
    )
    against = json.loads(found.out)["against"]
    assert found.code == 3
    assert (against["file"], against["within"]) == ("card.pickle + more.json", False)
    assert against["tolerance"] == {"share": 0.01, "bytes": None}
    (device,) = against["devices"]
    assert [one["difference_bytes"] for one in device["comparisons"]] == [0, 0, -50 << 20]
    for one in device["comparisons"]:
        for column in ("predicted_bytes", "recorded_bytes", "difference_bytes"):
            assert sum(part[column] for part in one["parts"]) == one[column]


def test_without_it_the_key_is_null(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--json", "-", script)
    assert json.loads(found.out)["against"] is None


def refused(found: Invocation, runner: FakeRunner, reason: str) -> None:
    assert found.code == 2
    error, following = found.err.splitlines()
    assert error.startswith("error: ")
    assert following.startswith("next: ")
    assert reason in error
    assert runner.calls == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello", "is no known kind of recording"),
        (b"peak memory: 3 GiB\nsecond line\n", "is no known kind of recording"),
        (b"cards were busy today\n", "is no known kind of recording"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "is no known kind of recording"),
        (b"PK\x03\x04" + bytes(40), "is no known kind of recording"),
        (gzip.compress(b"a log of a run\n", mtime=0), "is no known kind of recording"),
        (b"\x80\x04\x95", "truncated"),
        (b"\x80\x04}h\x05.", "is a damaged pickle"),
        (b"{", "no JSON"),
        (b'{"loss": 1}', "no figures of memory that vramfit knows"),
        (b'{"max_memory_reserved": "much"}', "not a size"),
        (b'{"segments": 5}', "segments is no list"),
    ],
)
def test_a_file_of_another_sort_is_refused_before_the_run(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    refused(vramfit("run", "--gpu", "RTX 4090", "--against", file, script), runner, reason)


def test_a_file_of_no_known_kind_is_answered_with_the_kinds(
    vramfit: Command, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("about 20 GB, I think\n")
    found = vramfit("run", "--gpu", "RTX 4090", "--against", tmp_path / "notes.txt", script)
    for kind in ("_dump_snapshot", ".vft", "vramfit run --json", "memory_stats()"):
        assert kind in found.err


def test_options_that_cannot_be_used_are_refused_before_the_run(
    vramfit: Command, runner: FakeRunner, script: Path, snapshot: Path, figures: Path, tmp_path: Path
) -> None:
    def run(*options: Any) -> Invocation:
        return vramfit("run", "--gpu", "RTX 4090", *options, script)

    missing = tmp_path / "missing.pickle"
    refused(run("--against", missing), runner, "no such file")
    refused(run("--against", tmp_path), runner, "it is a folder")
    refused(run("--against", snapshot, "--tolerance", "little"), runner, "'little' is not a tolerance")
    refused(run("--against", snapshot, "--against-device", "4"), runner, "knows nothing of device 4")
    refused(run("--against", snapshot, "--against", snapshot), runner, "two recordings")
    refused(run("--against", figures, "--against", figures), runner, "two files of figures")
    refused(run("--tolerance", "2%"), runner, "--tolerance has nothing to compare with")
    refused(run("--tolerance", "1%"), runner, "--tolerance has nothing to compare with")
    refused(run("--against-device", "0"), runner, "--against-device has nothing to compare with")


def test_devices_in_common_are_found_out_after_the_run(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "card.json"
    file.write_text(
        json.dumps(
            {"devices": [{"index": 4, "max_memory_reserved": 1}, {"index": 5, "max_memory_reserved": 1}]}
        )
    )
    found = vramfit("run", "--gpu", "RTX 4090", "--against", file, script)
    assert found.code == 2
    assert "which the run does not have" in found.err
    assert found.out.startswith("✓ fits RTX 4090")  # the run itself is reported all the same
    chosen = vramfit("run", "--gpu", "RTX 4090", "--against", file, "--against-device", "5", script)
    assert chosen.code == 3
    assert "GPU 0 beside GPU 5" in chosen.out
