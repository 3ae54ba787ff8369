"""What programs do to files, beside real ones: it works for the program, and every real byte and time stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.files.idioms import IDIOMS
from tests.files.planted import NAMES, picture, plant

from vramfit.files import Backend
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.trace import ChangeKind, Run
from vramfit.virtual.virtual_run import VirtualSettings, run_in_child

BACKENDS = [Backend.PATCHES, Backend.NAMESPACE]
PROGRAM = Path(__file__).with_name("idioms.py")
SHARED = Path("/dev/shm/vramfit-test-planted")


@dataclass(frozen=True)
class Ran:
    run: Run
    results: dict[str, str]
    before: dict[str, Any]
    after: dict[str, Any]
    folder: Path


def _refusal() -> str:
    """Why no namespace is possible, as a process without other threads finds; empty if it is."""
    ask = "from vramfit.files.namespace import why_not; print(why_not() or '')"
    asked = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


def plant_shared_memory(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """A file in memory, which lies below the folder of devices; what it looks like."""
    if not SHARED.parent.is_dir():
        return dict
    SHARED.write_text("planted")
    request.addfinalizer(lambda: SHARED.unlink(missing_ok=True))
    return lambda: {str(SHARED): (SHARED.read_text(), SHARED.stat().st_mtime_ns) if SHARED.exists() else None}


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.value)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All idioms in one child."""
    if request.param is Backend.NAMESPACE and (reason := _refusal()):
        pytest.skip(f"no namespace here: {reason}")
    folder = tmp_path_factory.mktemp("planted")
    results = tmp_path_factory.mktemp("results")
    plant(folder)
    shared = plant_shared_memory(request)
    before = picture(folder) | shared()
    run = run_in_child(
        [str(PROGRAM), str(results / "results.json")],
        RunOptions(gpu=find_gpu("24GiB"), cwd=str(folder), writes_through=(str(results),)),
        VirtualSettings(backend=request.param),
    )
    found = json.loads((results / "results.json").read_text())
    return Ran(run=run, results=found, before=before, after=picture(folder) | shared(), folder=folder)


@pytest.mark.parametrize("name", IDIOMS)
def test_the_program_finds_what_it_did(ran: Ran, name: str) -> None:
    assert ran.results[name] == "ok", ran.results[name]


def test_every_byte_mode_and_time_is_as_before(ran: Ran) -> None:
    changed = {name for name in {*ran.before, *ran.after} if ran.before.get(name) != ran.after.get(name)}
    assert not changed


def test_the_report_lists_what_would_have_happened(ran: Ran) -> None:
    files = ran.run.files
    assert files is not None and files.backend in {backend.value for backend in BACKENDS}
    assert files.writes == "discard" and files.kept_at is None
    kinds = {
        str(Path(entry.path).relative_to(ran.folder)): entry
        for entry in files.entries
        if Path(entry.path).is_relative_to(ran.folder)
    }
    assert kinds["best.pt"].kind is ChangeKind.REPLACED and kinds["best.pt"].size_bytes > 360_000
    assert kinds["copy2.pt"].kind is ChangeKind.WRITTEN
    planted = [f"planted epochs/epoch-{number}.pt\n" for number in (1, 2, 3)]
    if files.backend == "patches":
        assert kinds["epochs/epoch-1.pt"].kind is ChangeKind.DELETED
        assert kinds["epochs/epoch-1.pt"].size_bytes == len(planted[0])
    else:  # there the shell's `rm` worked, on the overlay
        assert kinds["epochs"].kind is ChangeKind.DELETED
        assert kinds["epochs"].size_bytes == sum(map(len, planted))
        assert kinds["shell.txt"].kind is ChangeKind.REPLACED
    assert kinds["folder"].kind is ChangeKind.DELETED
    assert kinds["tree2"].kind is ChangeKind.FOLDER
    assert kinds["times.txt"].kind is ChangeKind.METADATA
    assert "shell.txt" not in kinds or files.backend != "patches"
    assert not any(str(PROGRAM.parent) in entry.path for entry in files.entries)
    assert set(NAMES) & set(kinds), "the planted ones are among them"
