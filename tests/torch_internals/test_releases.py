"""Releases of torch that are too old are refused before anything of them is imported; untried ones are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vramfit
from vramfit.errors import EnvironmentUnfitError
from vramfit.record.recorder import release_warnings
from vramfit.torch_internals import releases

# Python runs `sitecustomize` when an interpreter starts. This one lets torch be another release from the moment it is
# imported, in the children of that interpreter too.
PRETENDING = """
import importlib.abc, importlib.machinery, sys

class Pretending(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    def __init__(self): pass
    def find_spec(self, name, path, target=None):
        if name != "torch.version":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        super().__init__(spec.loader.name, spec.loader.path)
        spec.loader = self
        return spec
    def exec_module(self, module):
        super().exec_module(module)
        module.__version__ = {version!r}

sys.meta_path.insert(0, Pretending())
"""
PROGRAM = "import torch\nprint(torch.__version__, torch.zeros(1 << 20, device='cuda:0').sum().device)\n"


def cold(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``vramfit ...`` in an interpreter that finds what lies in the folder first."""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "vramfit", *arguments]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda version: monkeypatch.setattr(
        torch, "__version__", torch.torch_version.TorchVersion(version)
    )


def newer(minor: int = 1) -> str:
    major, newest = releases.NEWEST_TRIED
    return f"{major}.{newest + minor}"


@pytest.fixture
def other_torch(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a torch of some version that cannot be imported."""

    def make(version: str) -> Path:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemError('torch was imported')\n")
        (package / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}'\n")
        return tmp_path

    return make


@pytest.mark.parametrize("arguments", [["run", "--gpu", "RTX 4090"], ["run", "--device", "cpu"], ["check"]])
def test_a_release_that_is_too_old_is_refused_in_one_line_and_never_imported(
    other_torch: Callable[[str], Path], arguments: list[str]
) -> None:
    folder = other_torch("2.8.0+cu128")
    (folder / "program.py").write_text(PROGRAM)
    budget = [] if arguments[0] == "run" else ["--budget", "1GiB", "--gpu", "RTX 4090"]
    done = cold(folder, *arguments, *budget, "program.py")
    assert (done.returncode, done.stdout) == (EnvironmentUnfitError.exit_code, "")
    oldest = releases.dotted(releases.OLDEST)
    said, next_step = done.stderr.splitlines()
    assert "torch 2.8.0+cu128 is too old" in said and f"needs {oldest} or later" in said
    assert next_step == f"next:  Install one: pip install --upgrade 'torch>={oldest}'"


def test_a_verb_whose_modules_it_cannot_import_says_so_as_well(other_torch: Callable[[str], Path]) -> None:
    folder = other_torch("2.9.1")
    (folder / "work.py").write_text("workload = None\n")
    done = cold(folder, "plan", "work.py:workload", "--gpu", "RTX 4090")
    assert done.returncode == EnvironmentUnfitError.exit_code
    assert done.stderr.startswith("error: torch 2.9.1 is too old") and len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    "version", [newer() + ".0", newer() + ".0.dev20270101+cu130", newer() + ".0a0+git1234abc"]
)
def test_an_untried_release_runs_with_one_warning_that_names_both(tmp_path: Path, version: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(PRETENDING).format(version=version))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = cold(tmp_path, "run", "--gpu", "RTX 4090", "--json", "run.json", "program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{version} cuda:0")
    written = json.loads((tmp_path / "run.json").read_text())
    (told,) = [one["message"] for one in written["warnings"] if one["code"] == releases.UNTRIED]
    newest = releases.dotted(releases.NEWEST_TRIED)
    assert told.startswith(f"torch {version} is newer than {newest}, the newest that vramfit was tried with")
    report = " ".join((done.stdout + done.stderr).split())
    assert report.count(f"torch {version} is newer than {newest}") == 1


def test_a_block_on_the_virtual_gpu_and_a_recording_say_so_too(pretend: Callable[[str], None]) -> None:
    pretend(newer())
    with vramfit.VirtualGPU("RTX 4090") as gpu:
        torch.zeros(4, device="cuda")
    assert [one.code for one in gpu.run.warnings].count(releases.UNTRIED) == 1
    assert [one.code for one in release_warnings()] == [releases.UNTRIED]


def test_releases_that_were_tried_are_run_in_silence(pretend: Callable[[str], None]) -> None:
    for release in (releases.OLDEST, releases.NEWEST_TRIED):
        pretend(f"{releases.dotted(release)}.3+cu130")
        releases.refuse_older()
        assert releases.untried() is None
        assert release_warnings() == ()


def test_a_block_in_this_process_refuses_an_older_one(pretend: Callable[[str], None]) -> None:
    pretend("2.9.1")
    with pytest.raises(EnvironmentUnfitError, match=r"torch 2\.9\.1 is too old"):
        vramfit.VirtualGPU("RTX 4090").__enter__()


def test_a_name_that_an_older_release_cannot_import_says_why(
    pretend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_it(name: str) -> object:
        raise AttributeError("module 'torch.optim' has no attribute 'Muon'")

    monkeypatch.setattr(vramfit, "_imported", import_it)
    with pytest.raises(AttributeError, match="Muon"):
        vramfit.__getattr__("track")
    pretend("2.8.0")
    with pytest.raises(EnvironmentUnfitError, match=r"torch 2\.8\.0 is too old"):
        vramfit.__getattr__("track")
    assert not hasattr(vramfit, "no_such_name")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.15.0+cu132", (2, 15)),
        ("2.16.0.dev20270101+cpu", (2, 16)),
        ("2.14.0a0+gitc0ffee", (2, 14)),
        ("3.0.0", (3, 0)),
        ("unknown", None),
    ],
)
def test_a_release_is_two_numbers(version: str, release: tuple[int, int] | None) -> None:
    assert releases.release_of(version) == release


def test_at_least_compares_numbers_and_takes_an_unknown_one_for_new(pretend: Callable[[str], None]) -> None:
    pretend("2.9.1")
    assert releases.at_least(2, 9) and not releases.at_least(2, 10) and not releases.at_least(3, 0)
    pretend("unknown")
    assert releases.at_least(2, 10)


def test_the_version_is_read_without_importing_torch(
    other_torch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(other_torch("2.77.0"))
    monkeypatch.delitem(sys.modules, "torch")
    assert releases.installed_version() == "2.77.0"
    assert "torch" not in sys.modules
