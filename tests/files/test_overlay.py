"""Random file operations on the overlay and on a plain copy: the same errors and trees, and real files that stay."""

from __future__ import annotations

import errno
import os
import shutil
import stat as modes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.files.planted import picture

from vramfit.files import real
from vramfit.files.calls import Calls
from vramfit.files.overlay import Overlay, View, Where
from vramfit.files.policy import FilePolicy, Writes

NAMES = ("a", "b", "c", "d", "e")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
WRITE = st.tuples(st.just("write"), PATHS, st.sampled_from([0, os.O_TRUNC, os.O_APPEND, os.O_EXCL]))
OPERATIONS = st.one_of(
    WRITE,
    WRITE,
    *(
        st.tuples(st.just(name), PATHS)
        for name in ("mkdir", "unlink", "rmdir", "utime", "stat", "scan", "truncate")
    ),
    *(st.tuples(st.just(name), PATHS, PATHS) for name in ("rename", "rename", "rename", "link")),
    st.tuples(st.just("symlink"), PATHS, st.sampled_from(["a", "d", "../e", "@/d", "@/e/d", "nothing"])),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o600, 0o755])),
)


class Plain:
    """The system's own calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def build(root: Path) -> None:
    for folder in ("d/e", "e/d/e"):
        (root / folder).mkdir(parents=True)
    for name in ("a", "d/a", "d/b", "d/e/c", "e/b", "e/d/a"):
        (root / name).write_text(name * 3)
        os.utime(root / name, ns=(1000, 2000))
    (root / "b").symlink_to("d")
    (root / "e/c").symlink_to("../a")
    (root / "d/d").symlink_to(root / "e")


@contextmanager
def overlaid() -> Iterator[tuple[Calls, Path, Path, Overlay]]:
    """An overlay, a folder, and its like on which the system works."""
    base = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        for name in ("below", "plain"):
            build(base / name)
        (base / "upper").mkdir()
        overlay = Overlay(policy(base))
        yield Calls(overlay), base / "below", base / "plain", overlay
        overlay.close()
    finally:
        shutil.rmtree(base)


def policy(base: Path, **changes: Any) -> FilePolicy:
    values = {"writes": Writes.DISCARD, "folder": str(base / "upper"), "temporary": str(base / "temporary")}
    return FilePolicy(**values | changes)


def perform(calls: Any, root: Path, operation: tuple[Any, ...], number: int) -> Any:
    """Do it; what it gives, or the name of its error."""
    what, name, *more = operation
    path = f"{root}/{name}"
    try:
        match what:
            case "write":
                file = calls.open(path, os.O_WRONLY | os.O_CREAT | more[0], 0o640)
                os.write(file, b"written %d" % number)
                os.close(file)
            case "rename" | "link":
                getattr(calls, what)(path, f"{root}/{more[0]}")
            case "symlink":
                calls.symlink(more[0].replace("@", str(root)), path)
            case "utime":
                calls.utime(path, ns=(5000, 7000))
            case "truncate":
                calls.truncate(path, 4)
            case "stat":
                found = calls.stat(path)
                return found.st_mode, 0 if modes.S_ISDIR(found.st_mode) else found.st_size
            case "scan":
                with calls.scandir(path) as entries:  # one of them may fail
                    return sorted((e.name, e.is_dir(), e.is_file(), e.is_symlink()) for e in entries)
            case _:
                getattr(calls, what)(path, *more)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def tree(calls: Any, root: Path) -> dict[str, Any]:
    """All that can be seen below a folder."""
    found: dict[str, Any] = {}
    waiting = [str(root)]
    while waiting:
        folder = waiting.pop()
        for name in calls.listdir(folder):
            path = f"{folder}/{name}"
            state = calls.lstat(path)
            key = path.removeprefix(str(root))
            if modes.S_ISDIR(state.st_mode):
                waiting.append(path)
                found[key] = modes.S_IMODE(state.st_mode)
            elif modes.S_ISLNK(state.st_mode):
                found[key] = calls.readlink(path).replace(str(root), "@")
            else:
                file = calls.open(path, os.O_RDONLY)
                set_time = state.st_mtime_ns if state.st_mtime_ns < 10_000 else None
                found[key] = os.read(file, 1000), state.st_mode, set_time, state.st_size
                os.close(file)
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, min_size=1, max_size=25))
def test_it_behaves_as_the_system_and_changes_nothing_below(operations: list[tuple[Any, ...]]) -> None:
    with overlaid() as (calls, below, plain, overlay):
        before = picture(below)
        for number, operation in enumerate(operations):
            seen = perform(calls, below, operation, number)
            assert seen == perform(Plain(), plain, operation, number), operation
        assert tree(calls, below) == tree(Plain(), plain)
        assert picture(below) == before
        again = Overlay(overlay.policy)
        assert again.folders == overlay.folders, "the log tells a parent the same"
        again.close()


def test_times_of_folders_follow_what_was_done_in_them() -> None:
    with overlaid() as (calls, below, _, _):
        for folder in ("d", "d/e"):
            os.utime(below / folder, ns=(1, 2))
        calls.stat(below / "d")
        calls.utime(below / "d/e/c", ns=(3, 4))
        assert calls.stat(below / "d/e").st_mtime_ns == 2, "a copy that nobody asked for leaves the time"
        calls.unlink(below / "d/e/c")
        assert calls.stat(below / "d/e").st_mtime_ns > 2 and calls.stat(below / "d").st_mtime_ns == 2


def test_forked_processes_see_what_each_other_did() -> None:
    with overlaid() as (calls, below, _, _):
        child = os.fork()
        if child == 0:
            calls.rename(below / "d", below / "moved")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not calls.access(below / "d", os.F_OK) and calls.stat(below / "moved/a").st_size == 9
        calls.mkdir(below / "d")
        assert calls.listdir(below / "d") == []


def test_no_thread_finds_half_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with overlaid() as (calls, below, _, overlay):
        path, seen = str(below / "a"), []
        copy = real.copy_contents

        def slow(source: str, target: str, most: int) -> bool:
            seen.append((overlay.find(path).where, calls.listdir(str(below))))
            done = copy(source, target, most)
            seen.append((overlay.find(path).where, calls.listdir(str(below))))
            return done

        monkeypatch.setattr(real, "copy_contents", slow)
        before = calls.listdir(str(below))
        os.close(calls.open(path, os.O_WRONLY | os.O_APPEND))
        assert seen == [(Where.BELOW, before)] * 2
        assert overlay.find(path).where is Where.UPPER
        assert calls.listdir("/").count(".vramfit-copy") == 0


def test_what_a_thread_finds_while_another_changes_the_picture_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with overlaid() as (calls, below, _, overlay):
        walk = overlay._walk

        def interrupted(path: str, links: list[int]) -> View:
            view = walk(path, links)
            monkeypatch.setattr(overlay, "_walk", walk)
            os.close(calls.open(str(below / "d" / "new"), os.O_WRONLY | os.O_CREAT))  # another thread, by now
            return view

        monkeypatch.setattr(overlay, "_walk", interrupted)
        assert overlay.view(str(below / "d")).folder is None  # as it was when the thread looked
        assert overlay.view(str(below / "d")).folder is not None


def test_a_read_only_file_or_folder_refuses_as_ever() -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    with overlaid() as (calls, below, _, _):
        (below / "a").chmod(0o444)
        (below / "d").chmod(0o555)
        with pytest.raises(PermissionError):
            calls.open(below / "a", os.O_WRONLY)
        with pytest.raises(PermissionError):
            calls.unlink(below / "d/a")
        (below / "d").chmod(0o755)


def test_what_is_written_through_is_real(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    through = str(tmp_path / "caches" / "hub")
    overlay = Overlay(policy(tmp_path, through=(through,)))
    calls = Calls(overlay)
    calls.mkdir(tmp_path / "caches")
    calls.mkdir(tmp_path / "caches/hub")
    calls.mkdir(tmp_path / "caches/other")
    file = calls.open(tmp_path / "download", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"weights")
    os.close(file)
    calls.rename(tmp_path / "download", tmp_path / "caches/hub/model")
    overlay.close()
    assert (tmp_path / "caches/hub/model").read_bytes() == b"weights"
    assert not (tmp_path / "caches/other").exists() and not (tmp_path / "download").exists()


def test_errors_name_the_path_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    overlay = Overlay(policy(tmp_path))
    calls = Calls(overlay)
    calls.mkdir(tmp_path / "new")
    with pytest.raises(FileNotFoundError) as missing:
        calls.stat(tmp_path / "new/nothing")
    with pytest.raises(FileNotFoundError) as both:
        calls.rename(tmp_path / "new/nothing", tmp_path / "new/x")
    overlay.close()
    assert missing.value.filename == tmp_path / "new/nothing"
    assert both.value.filename2 == tmp_path / "new/x"
