"""``--report``: one HTML page beside what a command prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import FakeRunner, Invocation

RECORDING = Path(__file__).parents[1] / "data" / "traces" / "eor-nn.json.gz"
Vramfit = Callable[..., Invocation]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def test_run_writes_a_page(vramfit: Vramfit, runner: FakeRunner, script: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    done = vramfit("run", "--gpu", "RTX 4090", "--report", page, script)
    assert done.code == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "fits RTX 4090" in text
    assert "fits RTX 4090" in done.out


@pytest.mark.parametrize("verb", ["replay", "explain"])
def test_a_recording_as_a_page(vramfit: Vramfit, tmp_path: Path, verb: str) -> None:
    page = tmp_path / "out.html"
    assert vramfit(verb, RECORDING, "--report", page).code == 0
    assert "<title>eor-nn.json.gz" in page.read_text()
    assert vramfit(verb, RECORDING, "--report", page, "--json", "-").out.startswith("{")


@pytest.mark.parametrize("verb", ["run", "replay", "explain"])
def test_a_page_that_cannot_be_written_is_found_out_first(
    vramfit: Vramfit, runner: FakeRunner, script: Path, tmp_path: Path, verb: str
) -> None:
    page = tmp_path / "nowhere" / "out.html"
    what = ("--gpu", "RTX 4090", "--report", page, script) if verb == "run" else (RECORDING, "--report", page)
    done = vramfit(verb, *what)
    assert done.code == 2
    assert "Create the folder first" in done.err
    assert done.out == ""
    assert runner.calls == []


def test_two_files_of_one_name_are_refused(
    vramfit: Vramfit, runner: FakeRunner, script: Path, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    done = vramfit("run", "--gpu", "RTX 4090", "--json", page, "--report", page, script)
    assert done.code == 2
    assert "--report names" in done.err
    assert not page.exists()
