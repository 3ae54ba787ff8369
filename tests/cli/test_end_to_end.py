"""From the program to the explanation: what a run says of itself, its files say too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import warm

from cli.conftest import Invocation

PROGRAM = """
import torch

device = {device!r}
try:
    kept, gone = [], []
    for _ in range(40):
        gone.append(torch.empty(9 << 20, dtype=torch.uint8, device=device))
        kept.append(torch.empty(9 << 20, dtype=torch.uint8, device=device))
    gone.clear()
    torch.empty({request}, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    if not {caught}:
        raise
"""
ON = {"virtual": ("cuda", ["--gpu", "2GiB"]), "cpu": ("cpu", ["--device", "cpu", "--budget", "2GiB"])}
REQUEST = {"virtual": 1000 << 20, "cpu": 1400 << 20}
"""More than is free outside the segments, less than is free in all."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    """Exit code of ``vramfit run``, in a process of its own."""
    command = [sys.executable, "-m", "vramfit", "run", *arguments]
    return warm.run(command, capture_output=True).returncode


@pytest.fixture(params=["virtual", "cpu"])
def ran_out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A program that leaves holes and then asks for more than is free in one piece."""
    device, options = ON[request.param]
    (tmp_path / "holes.py").write_text(
        PROGRAM.format(device=device, request=REQUEST[request.param], caught=False)
    )
    files = ["--trace", "run.vft", "--snapshot", "run.pickle", "--json", "run.json"]
    assert run(*options, *files, "holes.py") == 3
    return tmp_path


def test_the_files_know_what_was_free_when_it_ran_out(
    ran_out: Path, vramfit: Callable[..., Invocation]
) -> None:
    told = json.loads((ran_out / "run.json").read_text())["oom"]
    assert told["free_bytes"] > 0
    for file in ("run.vft", "run.pickle"):
        document = json.loads(vramfit("explain", file, "--json", "-").out)
        oom = document["run"]["oom"]
        assert {key: oom[key] for key in ("free_bytes", "short_by_bytes", "request")} == {
            key: told[key] for key in ("free_bytes", "short_by_bytes", "request")
        }
    printed = vramfit("explain", "run.vft").out
    assert "  as recorded               misses by" in printed
    assert "  defragmented              fits" in printed
    assert "no difference" in vramfit("diff", "run.vft", "run.pickle").out


@pytest.mark.parametrize("where", ON)
def test_an_error_that_was_caught_last_is_no_end(
    where: str, tmp_path: Path, vramfit: Callable[..., Invocation]
) -> None:
    device, options = ON[where]
    (tmp_path / "probe.py").write_text(PROGRAM.format(device=device, request=8 << 30, caught=True))
    files = ["--trace", "run.vft", "--snapshot", "run.pickle", "--json", "run.json"]
    assert run(*options, *files, "probe.py") == 0
    for file in ("run.vft", "run.pickle", "run.json"):
        found = vramfit("check", file, "--budget", "2GiB")
        assert found.code == 0, (file, found.out)
    assert "(caught)" in vramfit("explain", "run.vft").out


def test_a_reader_who_leaves_early_loses_no_file(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("import torch\nx = [torch.ones(1000) for _ in range(50)]\n")
    files = "--trace run.vft --json run.json --report run.html"
    command = f"{sys.executable} -m vramfit run --device cpu {files} quick.py | true; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "0\n", found.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"quick.py", "run.vft", "run.json", "run.html"}
    assert found.stderr == ""
