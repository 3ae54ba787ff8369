import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.synthetic import fitting_run, no_room_run, oom_run
from cli.conftest import FakeRunner, Invocation
from vramfit.cli import main
from vramfit.cli.program import end_options_at_module
from vramfit.errors import EnvironmentUnfitError
from vramfit.options.limits import Limits
from vramfit.trace import MemoryTrace, Run
from vramfit.trace.outcome import End, Progress
from vramfit.units import GIB

Command = Callable[..., Invocation]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "its-own.json", "-h", "--gpu", "x"],
        ["--help"],
        ["--version"],
        ["-m", "module", "--", "-x"],
        ["--", "--lr", "3"],
        ["-"],
        [""],
        ["--epochs=3", "data", "--gpus", "8"],
    ],
)
def test_all_after_the_script_is_the_scripts(
    vramfit: Command, runner: FakeRunner, script: Path, arguments: list[str]
) -> None:
    for before in ([], ["--"]):
        runner.calls.clear()
        assert vramfit("run", "--gpu", "RTX 4090", *before, script, *arguments).code == 0
        assert runner.command == [str(script), *arguments]
        assert runner.options["gpus"] == 1


@pytest.mark.parametrize("arguments", [[], ["--lr", "3"], ["-h"], ["--", "x"], ["-m", "y"], ["--gpu", "z"]])
@pytest.mark.parametrize("spelled", [["-m", "package.module"], ["-mpackage.module"]])
def test_all_after_the_module_is_the_modules(
    vramfit: Command, runner: FakeRunner, spelled: list[str], arguments: list[str]
) -> None:
    assert vramfit("run", "--gpu", "RTX 4090", *spelled, *arguments).code == 0
    assert runner.command == ["-m", "package.module", *arguments]


def test_options_end_at_the_module_only_where_it_is_ours() -> None:
    options = {"--gpu", "--json"}
    assert end_options_at_module(["--gpu", "-m", "-m", "x", "y"], options) == [
        "--gpu",
        "-m",
        "-m",
        "x",
        "--",
        "y",
    ]
    assert end_options_at_module(["--gpu=a", "s.py", "-m", "x"], options) == ["--gpu=a", "s.py", "-m", "x"]
    assert end_options_at_module(["--", "-m", "x"], options) == ["--", "-m", "x"]
    assert end_options_at_module(["--gpu", "a", "-m"], options) == ["--gpu", "a", "-m"]


def test_options_reach_the_runner(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    conf = "expandable_segments:True"
    found = vramfit("run", "--gpu", "RTX 4090", "--gpus", "2", "--alloc-conf", conf, script)
    assert found.code == 0
    assert runner.options["gpu"].name == "RTX 4090"
    assert runner.options["gpus"] == 2
    assert runner.options["alloc_conf"] == conf


def test_limits_reach_the_runner(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    assert (
        vramfit("run", "--gpu", "RTX 4090", "--steps", "3", "--time", "10m", script, "--steps", "9").code == 0
    )
    assert runner.options["limits"] == Limits(steps=3, seconds=600)
    assert runner.command == [str(script), "--steps", "9"]
    runner.calls.clear()
    found = vramfit("run", "--gpu", "RTX 4090", "--steps", "some", script)
    assert (found.code, runner.calls) == (2, [])
    assert "'some' is not a number of steps" in found.err and "steady" in found.err


def test_the_report_is_printed_after_the_program(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", script)
    assert found.out.startswith("✓ fits RTX 4090")
    assert found.err == ""


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (fitting_run(), 0),
        (oom_run(), 3),
        (oom_run(handled=True, exit_code=0), 0),
        (oom_run(handled=True, exit_code=7), 7),
        (no_room_run(), 3),
        (no_room_run(handled=True), 3),
        (no_room_run(asked=False), 3),
        (replace(fitting_run(), exit_code=1, error="ValueError"), 1),
        (replace(fitting_run(), exit_code=42), 42),
        (replace(fitting_run(), exit_code=-11), 139),
        (replace(fitting_run(), exit_code=130, progress=Progress(end=End.INTERRUPTED)), 130),
        (replace(fitting_run(), exit_code=-15, progress=Progress(end=End.TERMINATED)), 143),
        (replace(fitting_run(), progress=Progress(end=End.TIME)), 0),
        (replace(oom_run(), progress=Progress(end=End.STEPS)), 3),
    ],
)
def test_exit_codes(vramfit: Command, runner: FakeRunner, script: Path, run: Any, code: int) -> None:
    runner.result = run
    assert vramfit("run", "--gpu", "RTX 4090", script).code == code


def test_files_are_written(vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    files = [folder / "report.json", folder / "trace.vft", folder / "snapshot.pickle"]
    found = vramfit(
        "run", "--gpu", "RTX 4090", "--json", files[0], "--trace", files[1], "--snapshot", files[2], script
    )
    assert found.code == 0
    assert sorted(folder.iterdir()) == sorted(files)
    assert json.loads(files[0].read_text())["fits"] is True
    assert len(MemoryTrace.load(files[1])) == len(fitting_run().trace)
    assert files[2].stat().st_size > 1000


def test_json_on_standard_output_is_alone_there(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--json", "-", script)
    assert json.loads(found.out)["schema"] == "vramfit.run/1"
    assert not Path("-").exists()


def test_what_the_program_prints_does_not_mix_with_json(
    runner: FakeRunner, script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def prints(command: list[str], options: object, settings: object) -> Run:
        subprocess.run(["echo", "loss 0.5"], check=True)
        return fitting_run()

    monkeypatch.setattr(sys.modules["vramfit.virtual.virtual_run"], "run_in_child", prints)
    with pytest.raises(SystemExit):
        main(["run", "--gpu", "RTX 4090", "--json", "-", str(script)])
    captured = capfd.readouterr()
    assert json.loads(captured.out)["fits"] is True
    assert captured.err == "loss 0.5\n"


def refused(found: Invocation, runner: FakeRunner, reason: str, step: str, *, code: int = 2) -> None:
    """A one-line reason and a next step, no traceback, and nothing was run."""
    assert found.code == code
    error, following = found.err.splitlines()
    assert error.startswith("error: ")
    assert following.startswith("next: ")
    assert reason in error
    assert step in following
    assert found.out == ""
    assert runner.calls == []


def test_without_a_card_it_says_how_to_name_one(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    refused(vramfit("run", script), runner, "no card is given", "vramfit gpus")


def test_an_unknown_card_gets_suggestions(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    refused(vramfit("run", "--gpu", "RTX 4099", script), runner, "RTX 4099", "RTX 4090")


def test_no_program(vramfit: Command, runner: FakeRunner) -> None:
    refused(vramfit("run", "--gpu", "RTX 4090"), runner, "no script", "train.py")
    for module in (" ", "--", "--json"):
        found = vramfit("run", "--gpu", "RTX 4090", "-m", module)
        refused(found, runner, "-m needs the name of a module", "-m package.module")


def test_a_module_option_without_a_module(vramfit: Command, runner: FakeRunner) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "-m")
    assert found.code == 2
    assert "'-m' requires an argument" in found.err
    assert runner.calls == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"import sys\n\nx = = 3\n", "train.py line 3: invalid syntax"),
        (b"if True:\nx = 1\n", "train.py line 2: expected an indented block after 'if' statement on line 1"),
        (b"x = '\xe9'\n", "can't decode byte 0xe9"),
        (b"# coding: no-such-encoding\n", "unknown encoding: no-such-encoding"),
        (b"x = 1\n\0\n", "null bytes"),
    ],
    ids=["syntax", "indentation", "not UTF-8", "encoding", "null"],
)
def test_a_script_that_cannot_be_compiled_is_not_run(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path, source: bytes, reason: str
) -> None:
    script.write_bytes(source)
    report = tmp_path / "report.json"
    found = vramfit("run", "--gpu", "RTX 4090", "--json", report, script)
    refused(found, runner, reason, "", code=1)
    assert "train.py" in found.err.splitlines()[0]
    assert not report.exists()


@pytest.mark.parametrize(
    "source",
    [
        "# coding: latin-1\nx = 'é'\n".encode("latin-1"),
        "\ufeffx = 'é'\n".encode(),
        b"x = '\\d'\n",
        b"def f(x: Unknown): pass\n",
        b"",
    ],
    ids=["latin-1", "byte order mark", "warning", "annotation", "empty"],
)
def test_what_python_compiles_is_run(
    vramfit: Command, runner: FakeRunner, script: Path, source: bytes
) -> None:
    script.write_bytes(source)
    found = vramfit("run", "--gpu", "RTX 4090", script)
    assert (found.code, found.err) == (0, "")
    assert runner.command == [str(script)]


def test_help_tells_of_reports_that_cannot_be_written(vramfit: Command) -> None:
    assert "a report could not be written after the program ran" in " ".join(
        vramfit("--help").out.replace("│", " ").split()
    )


def test_a_missing_script_names_the_like(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", script.with_name("trian.py"))
    refused(found, runner, "there is no script", "Did you mean train.py?")
    found = vramfit("run", "--gpu", "RTX 4090", script.with_name("zzz.py"))
    refused(found, runner, "there is no script", "Check the path")
    found = vramfit("run", "--gpu", "RTX 4090", script.parent / "nowhere" / "train.py")
    refused(found, runner, "there is no script", "There is no folder")


def test_a_folder_is_no_script(vramfit: Command, runner: FakeRunner, tmp_path: Path) -> None:
    refused(vramfit("run", "--gpu", "RTX 4090", tmp_path), runner, "is a folder", "-m PACKAGE")


def test_an_unreadable_allocator_setting(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--alloc-conf", "max_split_size_mb:lots", script)
    refused(found, runner, "lots", "")


def test_a_number_that_torch_reads_otherwise_is_told(
    vramfit: Command, runner: FakeRunner, script: Path
) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--alloc-conf", "max_split_size_mb:64GiB", script)
    assert found.code == 0
    assert (
        found.err == "note: torch reads max_split_size_mb:64GiB as 64: what follows the number is dropped\n"
    )


def test_unwritable_results_are_found_before_the_run(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "report.json"
    for option in ("--json", "--trace", "--snapshot"):
        found = vramfit("run", "--gpu", "RTX 4090", option, missing, script)
        refused(found, runner, "cannot write", "Create the folder")
    same = tmp_path / "same"
    found = vramfit("run", "--gpu", "RTX 4090", "--json", same, "--trace", same, script)
    refused(found, runner, "another option names too", "its own file")


def test_a_full_disk_after_the_run(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = vramfit("run", "--gpu", "RTX 4090", "--json", tmp_path / "report.json", script)
    assert found.code == 2
    assert found.out.startswith("✓ fits"), "what was measured is still shown"
    assert "no space left on device" in found.err
    assert "Free some space" in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_unfit_environment_is_one_line(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    runner.result = EnvironmentUnfitError("torch 1.0 is too old", "Install torch 2.11 or newer")
    found = vramfit("run", "--gpu", "RTX 4090", script)
    assert found.code == 2
    assert found.err.splitlines() == [
        "error: torch 1.0 is too old",
        "next:  Install torch 2.11 or newer",
    ]


def test_a_bug_is_told_from_the_programs_failure(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    runner.result = ZeroDivisionError("ours")
    found = vramfit("run", "--gpu", "RTX 4090", script)
    assert found.code == 70
    assert "ZeroDivisionError: ours" in found.err
    assert "This is a bug in vramfit" in found.err


def test_an_interrupt_ends_with_the_shells_code(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    runner.result = KeyboardInterrupt()
    found = vramfit("run", "--gpu", "RTX 4090", script)
    assert (found.code, found.err) == (130, "error: interrupted before the program began\n")


@pytest.mark.parametrize("verb", [("run",), ("check", "--budget", "1GiB")])
def test_a_program_that_ran_out_is_run_again(
    vramfit: Command, runner: FakeRunner, script: Path, verb: tuple[str, ...]
) -> None:
    runner.result, runner.again = oom_run(), fitting_run()
    used = fitting_run().devices[0]
    device = replace(used, peak_allocated_bytes=20 * GIB, peak_reserved_bytes=20 * GIB)
    runner.again = replace(runner.again, devices=(device,))
    text = " ".join(vramfit(*verb, "--gpu", "RTX 4090", script).out.split())
    assert "It needs 20.39 GiB in all, or up to 20.44 GiB, since the driver's addresses decide" in text
    assert "are split. The smallest card that has it is" in text
    text = " ".join(vramfit(*verb, "--gpu", "RTX 4090", "--no-need", script).out.split())
    assert "It needs at least 8.10 GiB. How much in all is not known: it was not run again" in text
    assert "card that has it" not in text
    assert [call["ends_line"] for _, call in runner.calls] == [True, True]


@pytest.mark.parametrize(
    "arguments", [["--gpus", "0"], ["--gpus", "9"], ["--gpus", "two"], ["--no-such-option"]]
)
def test_wrong_options_are_usage_errors(
    vramfit: Command, runner: FakeRunner, script: Path, arguments: list[str]
) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", *arguments, script)
    assert found.code == 2
    assert runner.calls == []
    assert arguments[0] in found.err


@pytest.mark.parametrize("name", ["run.json", "run.svg", "run.pickle"])
def test_a_trace_of_another_forms_name_is_refused_before_the_program_runs(
    vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path, name: str
) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--trace", tmp_path / name, script)
    assert found.code == 2
    assert "a trace is another form" in " ".join(found.err.split())
    assert runner.calls == []


def test_the_clocks_of_a_program_are_chosen(vramfit: Command, runner: FakeRunner, script: Path) -> None:
    assert vramfit("run", "--gpu", "RTX 4090", "--clock", "simulated", script).code == 0
    assert runner.options["clock"] == "simulated"
    runner.calls.clear()
    assert vramfit("run", "--gpu", "RTX 4090", script).code == 0
    assert runner.options["clock"] == "real"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu", "RTX 4090", "--clock", "wall"], "clock='wall' is no clock"),
        (["--device", "cpu", "--clock", "simulated"], "--clock is for a virtual GPU"),
    ],
)
def test_clocks_that_cannot_be_had_are_refused(
    vramfit: Command, script: Path, arguments: list[str], told: str
) -> None:
    done = vramfit("run", *arguments, script)
    assert done.code == 2 and told in done.err
