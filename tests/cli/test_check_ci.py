"""`vramfit check` in continuous integration: what a workflow's step shows, and `--junit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from analysis.synthetic import fitting_run, oom_run, virtual_run
from cli.conftest import FakeRunner, Invocation
from vramfit.trace import Frame
from vramfit.trace.outcome import End, Progress

Command = Callable[..., Invocation]
RUN = fitting_run()
USED = RUN.devices[0].peak_reserved_bytes + RUN.devices[0].context_bytes


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A step of a workflow, and the file of its summary, which other commands of the step wrote to before."""
    path = tmp_path / "summary.md"
    path.write_text("before\n\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    return path


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("::")]


def suite_of(path: Path) -> Element:
    [suite] = ElementTree.fromstring(path.read_bytes())
    return suite


class TestGitHub:
    def test_a_budget_that_is_not_kept(
        self, vramfit: Command, runner: FakeRunner, script: Path, summary: Path
    ) -> None:
        found = vramfit("check", script, "--budget", f"{USED - 1}B", "--gpu", "RTX 4090")
        assert found.code == 3
        assert found.out.startswith("✗ failed")
        [command] = commands(found.out)
        assert command.startswith("::error title=GPU memory over its budget::")
        assert "1 B over%0A" in command
        text = summary.read_text()
        assert text.startswith("before\n\n### ✗ GPU memory: ") and text.endswith("|\n\n")
        assert "| activations |" in text

    def test_the_line_of_the_program_is_annotated(
        self, vramfit: Command, runner: FakeRunner, script: Path, summary: Path
    ) -> None:
        run = oom_run()
        assert run.oom is not None
        runner.result = replace(run, oom=replace(run.oom, user_line=Frame(str(script), 1, "<module>")))
        found = vramfit("check", script, "--budget", "20GiB")
        assert found.code == 3
        assert commands(found.out)[0].startswith("::error title=GPU out of memory,file=train.py,line=1::")

    def test_one_that_is_kept(
        self, vramfit: Command, runner: FakeRunner, script: Path, summary: Path
    ) -> None:
        found = vramfit("check", script, "--budget", f"{USED}B", "--gpu", "RTX 4090")
        assert found.code == 0
        assert not commands(found.out + found.err)
        assert "### ✓ GPU memory" in summary.read_text()

    def test_json_on_standard_output_stays_alone_there(
        self, vramfit: Command, runner: FakeRunner, script: Path, summary: Path
    ) -> None:
        found = vramfit("check", script, "--budget", f"{USED - 1}B", "--gpu", "RTX 4090", "--json", "-")
        assert json.loads(found.out)["passed"] is False
        assert len(commands(found.err)) == 1

    def test_a_program_that_fails(
        self, vramfit: Command, runner: FakeRunner, script: Path, summary: Path
    ) -> None:
        runner.result = virtual_run(RUN.trace, exit_code=7, error="ValueError: 100 % wrong")
        found = vramfit("check", script, "--budget", "20GiB")
        assert found.code == 7
        [command] = commands(found.out)
        assert command.startswith("::error title=GPU memory not checked::")
        assert "ValueError: 100 %25 wrong" in command
        assert "Not checked: the program failed" in summary.read_text()

    @pytest.mark.parametrize("name", ["GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"])
    def test_elsewhere_nothing_is_written(
        self,
        vramfit: Command,
        runner: FakeRunner,
        script: Path,
        summary: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
    ) -> None:
        monkeypatch.delenv(name)
        found = vramfit("check", script, "--budget", f"{USED - 1}B", "--gpu", "RTX 4090")
        assert found.code == 3
        assert len(commands(found.out)) == (0 if name == "GITHUB_ACTIONS" else 1)
        assert summary.read_text() == "before\n\n"

    def test_a_summary_that_cannot_be_written_changes_no_gate(
        self,
        vramfit: Command,
        runner: FakeRunner,
        script: Path,
        summary: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary / "nowhere"))
        found = vramfit("check", script, "--budget", f"{USED}B", "--gpu", "RTX 4090")
        assert found.code == 0
        assert "Did not write the step summary" in found.err


class TestJunit:
    @pytest.mark.parametrize(("budget", "failures"), [(USED, "0"), (USED - 1, "1")])
    def test_of_a_program(
        self,
        vramfit: Command,
        runner: FakeRunner,
        script: Path,
        tmp_path: Path,
        budget: int,
        failures: str,
    ) -> None:
        runner.result = replace(RUN, seconds_wall=12.5)
        path = tmp_path / "memory.xml"
        found = vramfit("check", script, "--budget", f"{budget}B", "--gpu", "RTX 4090", "--junit", path)
        assert found.code == (3 if failures == "1" else 0)
        suite = suite_of(path)
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", failures, "0")
        assert suite.get("time") == "12.500"
        assert not commands(found.out + found.err)

    def test_of_a_file(self, vramfit: Command, tmp_path: Path) -> None:
        trace, path = tmp_path / "run.vft", tmp_path / "memory.xml"
        RUN.trace.save(trace)
        assert vramfit("check", trace, "--baseline", trace, "--junit", path).code == 0
        assert [case.get("name") for case in suite_of(path)][1:] == [
            "run.vft: peak reserved of GPU 0 within its baseline",
            "run.vft: peak allocated of GPU 0 within its baseline",
        ]

    def test_what_could_not_be_checked_is_an_error(
        self, vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "memory.xml"
        options = ("--budget", "20GiB", "--gpu", "RTX 4090", "--junit", path)
        for result, code in (
            (virtual_run(RUN.trace, exit_code=7, error="ValueError: no data"), 7),
            (replace(RUN, exit_code=130, progress=Progress(end=End.INTERRUPTED), oom=None), 130),
        ):
            path.unlink(missing_ok=True)
            runner.result = result
            assert vramfit("check", script, *options).code == code
            assert suite_of(path).get("errors") == "1"
        path.unlink()
        script.write_text("def broken(:\n")
        assert vramfit("check", script, *options).code == 1
        assert suite_of(path).get("errors") == "1"

    def test_it_is_checked_before_the_program_runs(
        self, vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path
    ) -> None:
        for options in (
            ("--junit", tmp_path / "nowhere" / "x.xml"),
            ("--junit", tmp_path / "x", "--json", tmp_path / "x"),
        ):
            assert vramfit("check", script, "--budget", "20GiB", *options).code == 2
        assert not runner.calls


def test_a_traces_paths_of_another_machine_are_told_in_the_message(
    vramfit: Command, tmp_path: Path, summary: Path
) -> None:
    trace = tmp_path / "run.vft"
    RUN.trace.save(trace)
    found = vramfit("check", trace, "--budget", f"{USED - 1}B")
    [command] = commands(found.out)
    assert "file=" not in command and "(nets/gpt.py:40)" in command
