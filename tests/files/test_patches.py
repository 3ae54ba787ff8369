"""The patches in a process of the user's own: gone afterwards, and what they do not lead away is refused."""

from __future__ import annotations

import _io
import builtins
import glob
import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import posix
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.files.planted import picture

from vramfit.errors import UsageError
from vramfit.files import current, make_policy, protect, real
from vramfit.files.patches import refusals
from vramfit.files.policy import FilePolicy, default_through
from vramfit.files.protection import recovered, standing
from vramfit.trace import ChangeKind, FileChanges

MODULES = (os, posix, io, _io, builtins, shutil, tempfile, sqlite3, torch, torch._C, torch.jit)
CLASSES = (
    socket.socket,
    torch.UntypedStorage,
    *(value for value in vars(glob).values() if isinstance(value, type)),
)


@contextmanager
def protected(workplace: Path, **changes: Any) -> Iterator[FilePolicy]:
    workplace.mkdir(exist_ok=True)
    policy = make_policy("discard", workplace=workplace, backend="patches")
    policy = FilePolicy(**{name: getattr(policy, name) for name in policy.__slots__} | changes)
    with standing(protect(policy, in_child=False)):
        yield policy


def bindings() -> dict[tuple[str, str], Any]:
    found = {(m.__name__, name): value for m in (*MODULES, *CLASSES) for name, value in list(vars(m).items())}
    found["environ", "TMPDIR"] = os.environ.get("TMPDIR")
    found["sys", "meta_path"] = list(sys.meta_path)
    return found


def test_leaving_puts_everything_back(tmp_path: Path) -> None:
    before = bindings()
    with protected(tmp_path / "work"):
        assert bindings() != before and current() is not None
    after = bindings()
    assert {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)} <= {
        ("sys", "meta_path"),
        ("environ", "TMPDIR"),
    }
    assert after["sys", "meta_path"] == before["sys", "meta_path"]
    assert after["environ", "TMPDIR"] == before["environ", "TMPDIR"] and current() is None


def test_what_was_set_aside_is_seen_inside_and_gone_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("real")
    before = picture(tmp_path)
    with protected(tmp_path.parent / "work"):
        file.write_text("virtual")
        (tmp_path / "new").mkdir()
        assert file.read_text() == "virtual" and sorted(os.listdir(tmp_path)) == ["file.txt", "new"]
        assert sorted(tmp_path.glob("*")) == [file, tmp_path / "new"] == sorted(tmp_path.rglob("*"))
        shutil.copy(file, tmp_path / "new" / "copy.txt")
        assert (tmp_path / "new" / "copy.txt").read_text() == "virtual"
        standing_now = current()
        assert standing_now is not None
        changes = standing_now.changes()
    assert file.read_text() == "real" and picture(tmp_path) == before
    told = {Path(entry.path).name: entry.kind for entry in changes.entries}
    written = {"new": ChangeKind.FOLDER, "copy.txt": ChangeKind.WRITTEN}
    assert told == {"file.txt": ChangeKind.REPLACED, **written}


def test_what_no_patch_leads_away_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("real")
    with protected(tmp_path / "work"):
        for write in (
            lambda: real.open_file(file, "w"),
            lambda: real.unlink(file),
            lambda: real.rename(file, tmp_path / "other"),
            lambda: real.utime(file),
            lambda: real.chmod(file, 0o600),
            lambda: real.symlink("x", tmp_path / "link"),
        ):
            with pytest.raises(PermissionError, match="vramfit refused"):
                write()
        with real.open_file(file) as reading:
            assert reading.read() == "real"
    real.utime(file)


def test_a_descriptor_for_reading_is_no_way_to_write(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("real")
    before = picture(tmp_path)
    with protected(tmp_path.parent / "work"), open(file) as reading:
        behind = Path(f"/proc/self/fd/{reading.fileno()}")
        behind.write_text("virtual")
        behind.chmod(0o600)
        os.utime(behind, (1, 2))
        os.truncate(behind, 3)
        assert file.read_text() == "vir"
    assert picture(tmp_path) == before
    (tmp_path / "folder").mkdir()
    inside = tmp_path / "folder" / "inside.txt"
    inside.write_text("real")
    before = picture(tmp_path)
    with protected(tmp_path.parent / "work2"), open(inside) as reading:
        os.rename(inside.parent, tmp_path / "moved")
        with pytest.raises(FileNotFoundError):
            Path(f"/proc/self/fd/{reading.fileno()}").write_text("virtual")
    assert picture(tmp_path) == before


@pytest.mark.filterwarnings("ignore:Passing more than 1 positional argument:DeprecationWarning")
def test_what_sqlite_opens_past_connect_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    with sqlite3.connect(file) as made:
        made.execute("CREATE TABLE runs (id)")
    made.close()
    before = picture(tmp_path)
    with protected(tmp_path.parent / "work"):
        with pytest.raises(PermissionError, match="vramfit refused"):
            sqlite3.Connection(file)
        memory = sqlite3.connect("file::memory:", uri=True)
        with pytest.raises(sqlite3.DatabaseError, match="authoriz"):
            memory.execute("ATTACH DATABASE ? AS real", (str(file),))
        with pytest.raises(sqlite3.DatabaseError, match="authoriz"):
            memory.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
        memory.execute(f"ATTACH DATABASE 'file:{file}?mode=memory' AS other")
        memory.execute("DETACH DATABASE other")
        memory.execute("VACUUM")
        memory.close()
        arguments = (5.0, 0, None, True, sqlite3.Connection, 128, True)
        by_position = sqlite3.connect(f"file:{file}?mode=rw", *arguments)
        by_position.execute("INSERT INTO runs VALUES (1)")
        by_position.commit()
        by_position.close()
        with sqlite3.connect(file) as again:
            assert again.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        again.close()
    assert picture(tmp_path) == before


def test_open_can_be_pickled(tmp_path: Path) -> None:
    with protected(tmp_path / "work"):
        assert pickle.loads(pickle.dumps(open)) is open


def test_files_are_what_open_gives(tmp_path: Path) -> None:
    with protected(tmp_path / "work"):
        path = tmp_path / "x"
        with open(path, "wb") as binary:
            assert isinstance(binary, io.BufferedWriter) and isinstance(binary.raw, io.FileIO)
            assert binary.name == path and binary.mode == "wb"
        with open(str(path), "w+", encoding="utf-8") as text:
            assert text.name == str(path) and text.mode == "w+" and text.encoding == "utf-8"
        with open(path, "ab", buffering=0) as raw:
            raw.write(b"abc")
        assert path.read_bytes() == b"abc"
        for mode in ("rw", "q", "wbt"):
            with pytest.raises(ValueError):
                open(path, mode)
        with pytest.raises(FileExistsError) as there:
            open(path, "x")
        assert there.value.filename == path


def test_contents_beyond_the_cap_are_dropped_and_sizes_stay(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with protected(work, cap_bytes=1 << 20) as policy:
        for number in range(3):
            (tmp_path / f"{number}.bin").write_bytes(os.urandom(1 << 20))
        assert [(tmp_path / f"{number}.bin").stat().st_size for number in range(3)] == [1 << 20] * 3
        occupied = sum(p.lstat().st_blocks * 512 for p in Path(policy.folder).rglob("*.bin"))
        standing_now = current()
        assert standing_now is not None
        (note,) = standing_now.changes().notes
    assert occupied <= 1 << 20 and "the contents" in note


def test_overwriting_again_and_again_is_not_counted_as_growth(tmp_path: Path) -> None:
    with protected(tmp_path / "work", cap_bytes=1 << 20):
        contents = os.urandom(1 << 18)
        for _ in range(10):
            (tmp_path / "last.bin").write_bytes(contents)
        assert (tmp_path / "last.bin").read_bytes() == contents


def test_a_parent_learns_what_a_killed_process_had_done(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("real")
    (tmp_path / "work").mkdir()
    policy = make_policy("discard", workplace=tmp_path / "work", backend="patches")
    child = os.fork()
    if child == 0:
        protect(policy, in_child=False).__enter__()
        os.replace(file, tmp_path / "moved.txt")
        os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9
    found = recovered(policy)
    assert isinstance(found, FileChanges)
    assert {(Path(e.path).name, e.kind) for e in found.entries} == {
        ("file.txt", ChangeKind.DELETED),
        ("moved.txt", ChangeKind.WRITTEN),
    }
    assert file.read_text() == "real"


def test_policies() -> None:
    with pytest.raises(UsageError, match="Choose one of discard, keep, real"):
        make_policy("sometimes", workplace="/nowhere")
    through = default_through({"HOME": "/home/u", "HF_HOME": "/hf", "TORCH_HOME": "/torch"})
    assert "/hf/hub" in through and "/torch/hub" in through
    assert not any("datasets" in path or path == "/home/u/.cache" for path in through)


def test_a_folder_of_work_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, home = tmp_path / "work" / "project", tmp_path / "home"
    for folder in (project, home):
        folder.mkdir(parents=True)
    monkeypatch.chdir(project)
    named = {
        "HOME": str(home),
        "TRITON_HOME": str(tmp_path / "models"),
        "YOLO_CONFIG_DIR": str(tmp_path / "models"),
        "NLTK_DATA": f"/one{os.pathsep}/other",
        "MPLCONFIGDIR": "/tmp",
        "NUMBA_CACHE_DIR": ".",
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "work"),
        "CUDA_CACHE_PATH": "~",
    }
    monkeypatch.setenv("HOME", str(home))
    through = default_through(named)
    assert {"/one", "/other"} <= set(through)
    assert str(tmp_path / "models" / ".triton") in through
    assert str(tmp_path / "models" / "Ultralytics") in through
    assert not {"/tmp", ".", "~", str(tmp_path / "work"), str(tmp_path / "models")} & set(through)


LEFT = """
from pathlib import Path
from vramfit.virtual.gpu import VirtualGPU

VirtualGPU("RTX 4090").__enter__()
Path("deep/er").mkdir(parents=True)
Path("deep/er/kept.txt").write_text("aside")
raise SystemExit(5)
"""


def test_a_process_that_ends_inside_a_block_leaves_nothing(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    for folder in (work, temporary):
        folder.mkdir()
    ended = warm.run(
        [sys.executable, "-c", LEFT],
        cwd=work,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 5 and "Error" not in ended.stderr
    assert not [*work.iterdir(), *temporary.glob("vramfit*")]


def test_the_last_events_of_an_interpreter_find_no_names_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of modules are None by then; a hook stays for good."""
    for name in ("_events", "_watched"):
        monkeypatch.setattr(refusals, name, None)
    refusals._hook("import", ("anything",))
    refusals._hook("open", ("anything", "w", 0))


def test_a_fork_server_ends_with_the_folder_of_its_socket() -> None:
    for _ in range(2):
        # The path of a socket is short.
        with tempfile.TemporaryDirectory() as folder, protected(Path(folder) / "work"):
            child = multiprocessing.get_context("forkserver").Process(target=os.getpid)
            child.start()
            child.join()
            assert child.exitcode == 0
        assert multiprocessing.forkserver._forkserver._forkserver_pid is None
        waiting = multiprocessing.util._finalizer_registry.values()
        assert not any(folder in str(finalizer._args) for finalizer in waiting), (
            "it is to be removed at the end"
        )
