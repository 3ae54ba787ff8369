"""The examples for continuous integration: the files are valid, and what they run really runs."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import warm

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "examples" / "ci"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What a runner would do with the words of a command, with `vramfit` and `pytest` of this interpreter."""
    program, *arguments = words
    assert program in ("vramfit", "pytest")
    command = [sys.executable, "-m", program, *arguments]
    return warm.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the program and the tests of the example."""
    for name in ("train.py", "test_memory.py"):
        shutil.copy(CI / name, tmp_path)
    return tmp_path


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(CI / "github-actions.yml")["jobs"]["gpu-memory"]["steps"]
    return found


@pytest.mark.slow
def test_the_workflow_runs_from_its_baseline_to_its_tests(project: Path) -> None:
    """Every command but the installation, in order; the baseline is written as the comment above it says."""
    text = (CI / "github-actions.yml").read_text()
    [baseline] = re.findall(r"# Commit the baseline: (.+)", text)
    commands = [step["run"] for step in steps() if "run" in step and step["name"] != "Install"]
    assert [shlex.split(command)[:2] for command in commands] == [
        ["vramfit", "check"],
        ["vramfit", "check"],
        ["pytest", "-m"],
        ["vramfit", "run"],
    ]
    for command in (baseline, *commands[1:3]):
        words = shlex.split(command)
        assert "\n" not in command and shlex.join(words) == command.replace('"', "'"), (
            "words alone, of any shell"
        )
        done = run(words, project)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert json.loads((project / "check.json").read_text())["passed"] is True
    assert "3 tests are metered on virtual RTX 4090" in done.stdout
    assert (project / "memory.xml").exists()


def test_what_the_workflow_uploads_is_what_its_commands_write() -> None:
    upload = next(step for step in steps() if "upload-artifact" in step.get("uses", ""))
    commands = " ".join(step.get("run", "") for step in steps())
    for name in upload["with"]["path"].split():
        assert name in commands


def test_the_options_of_every_command_exist() -> None:
    """Those that the other test does not run: budget and report."""
    import typer

    from vramfit.cli import app

    known = {
        option
        for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        for option in parameter.opts
    }
    for step in steps():
        for command in re.split(r"\s*&&\s*", step.get("run", "")):
            words = shlex.split(command)
            if words[:1] == ["vramfit"]:
                own = words[: words.index("--")] if "--" in words else words[: words.index("train.py")]
                assert {word for word in own if word.startswith("--")} <= known, command


def hooks() -> dict[str, dict[str, Any]]:
    return {hook["id"]: hook for hook in read(ROOT / ".pre-commit-hooks.yaml")}


def configured() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(CI / "pre-commit-config.yaml")["repos"][0]["hooks"]
    return found


def test_the_configuration_names_hooks_that_exist() -> None:
    assert {hook["id"] for hook in configured()} == set(hooks())
    for hook in hooks().values():
        assert hook["language"] == "system"  # an environment of its own would have to install torch anew
        assert hook["pass_filenames"] is False


def test_the_check_hook_stops_what_does_not_fit(project: Path) -> None:
    """Run as pre-commit runs it: the entry, then the arguments."""
    [arguments] = [hook["args"] for hook in configured() if hook["id"] == "vramfit-check"]
    entry = shlex.split(hooks()["vramfit-check"]["entry"])
    done = run([*entry, *arguments, "--", "--batch-size", "4096"], project)
    assert done.returncode == 3, done.stdout + done.stderr


def test_the_test_hook_runs_what_the_workflow_runs() -> None:
    [arguments] = [hook["args"] for hook in configured() if hook["id"] == "vramfit-pytest"]
    entry = shlex.split(hooks()["vramfit-pytest"]["entry"])
    [command] = [shlex.split(step["run"]) for step in steps() if step.get("run", "").startswith("pytest")]
    assert entry == ["python", "-m", *command[: len(entry) - 2]]
    assert arguments == [*command[command.index("--vram-gpu") :][:2], "test_memory.py"]


def test_pre_commit_takes_both_files() -> None:
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    for command, file in (
        ("validate-manifest", ROOT / ".pre-commit-hooks.yaml"),
        ("validate-config", CI / "pre-commit-config.yaml"),
    ):
        subprocess.run([sys.executable, "-m", "pre_commit", command, str(file)], check=True)
