"""Standard output and standard error that cannot be written to: closed pipes and full disks, for every verb alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests import warm

from analysis.synthetic import fitting_run

VERBS = (
    "explain {trace}",
    "check {trace} --budget 100GiB",
    "diff {trace} {trace}",
    "replay {trace}",
    "replay {trace} --json -",
    "tune {trace} --settings backend:native",
    "export {trace} -o {folder}/a.csv",
    "gpus",
    "--help",
    "--version",
)
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "run.vft"
    fitting_run().trace.save(path)
    return path


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads, as that of ``| head`` after its lines."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def run(line: str, trace: Path, **streams: object) -> subprocess.CompletedProcess[str]:
    arguments = line.format(trace=trace, folder=trace.parent).split()
    return warm.run([sys.executable, "-m", "vramfit", *arguments], text=True, check=False, **streams)


@pytest.mark.parametrize("line", VERBS)
def test_a_reader_who_leaves_early_changes_nothing(line: str, trace: Path, closed_pipe: int) -> None:
    done = run(line, trace, stdout=closed_pipe, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stderr == ""


def test_nor_the_code_of_a_gate_that_fails(trace: Path, closed_pipe: int) -> None:
    done = run("check {trace} --budget 1MiB", trace, stdout=closed_pipe, stderr=subprocess.PIPE)
    assert done.returncode == 3
    assert done.stderr == ""


@needs_full
@pytest.mark.parametrize("line", VERBS)
def test_a_full_disk_is_told_in_a_line(line: str, trace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run(line, trace, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot write standard output: no space left on device\n"
        "next:  Free some space or choose a path on another disk\n"
    )


@needs_full
def test_what_else_was_asked_for_is_written_all_the_same(trace: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run(
            f"tune {{trace}} --settings backend:native --json {tmp_path}/t.json",
            trace,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert (tmp_path / "t.json").read_text().endswith("}\n")


@needs_full
def test_an_error_that_nobody_can_read_keeps_its_code(trace: Path) -> None:
    with open("/dev/full", "w") as full:
        assert run("gpus nonesuch", trace, stdout=subprocess.PIPE, stderr=full).returncode == 2


CLOSED = """
import os, runpy, sys
for fd, name in enumerate(("stdin", "stdout", "stderr")):
    if str(fd) in sys.argv[1]:  # as an interpreter finds it that a shell starts so
        os.close(fd)
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
del sys.argv[1]
runpy.run_module("vramfit", run_name="__main__", alter_sys=True)
"""
"""``vramfit`` with these of its streams closed, in a fork."""


def with_closed(streams: str, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return warm.run([sys.executable, "-c", CLOSED, streams, *command], capture_output=True)


def closed_by_the_shell(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "vramfit"]
    return subprocess.run([*shell, *command], capture_output=True, check=False)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(
    "start",
    [partial(with_closed, "0"), partial(with_closed, "1"), partial(with_closed, "2"), closed_by_the_shell],
    ids=["<&-", ">&-", "2>&-", "<&- >&- 2>&-"],
)
def test_streams_that_the_shell_closed_lead_nowhere(
    start: Callable[[list[str]], subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """What is printed there gets into no file that happens to be opened next, of a child either."""
    program, told = tmp_path / "program.py", tmp_path / "told.json"
    program.write_text(
        "import os, sys\nprint('printed')\nprint('told', file=sys.stderr)\nos.write(1, b'raw')\nos.write(2, b'raw')\n"
    )
    done = start(["run", "--gpu", "24GiB", "--json", str(told), str(program)])
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads(told.read_text())["exit_code"] == 0


def test_a_plan_needs_no_standard_error(tmp_path: Path) -> None:
    workload, plan = tmp_path / "workload.py", tmp_path / "plan.toml"
    workload.write_text(
        "import torch\nfrom vramfit import Workload\n"
        "workload = Workload(model=lambda: torch.nn.Linear(4, 4), batch=lambda n: torch.randn(n, 4),\n"
        "    sizes={'n': 2}, loss=lambda model, batch: model(batch).sum())\n"
    )
    done = with_closed("2", ["plan", f"{workload}:workload", "--gpu", "24GiB", "-o", str(plan)])
    assert done.returncode == 0, done.stdout
    assert plan.exists()


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a folder in use cannot be deleted")
@pytest.mark.parametrize("line", ["explain run.vft", "run --gpu 24GiB train.py"])
def test_a_current_folder_that_was_deleted_is_told(line: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-m", "vramfit", *line.split()]
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *command],
        cwd=gone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: the current folder was deleted",
        "next:  Change to another folder and call vramfit there",
    ]
