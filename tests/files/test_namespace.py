"""The namespace backend: what programs do in it, and that the real files are as before, for root and for others."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vramfit.files import FilePolicy, Writes
from vramfit.files.namespace import attended, settle
from vramfit.files.namespace.attending import LISTING
from vramfit.files.namespace.contents import PLACE, Manifest
from vramfit.files.namespace.tree import MountedOverlay
from vramfit.plain import to_plain

INSIDE = Path(__file__).with_name("namespace_inside.py")
ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
OLD = 1_500_000_000_123_456_789

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")


@dataclass(frozen=True)
class User:
    """Who runs a program: a user id, or this process's own, with or without the right to mount."""

    name: str
    number: int
    group: int
    drop_right: bool = False
    interpreter: str = sys.executable

    def own(self, *paths: Path) -> None:
        for path in paths:
            os.chown(path, self.number, self.group, follow_symlinks=False)


@dataclass
class Ran:
    """A program that ran in a namespace, with the files that it found."""

    area: Path
    policy: FilePolicy
    before: dict[str, Any]
    elsewhere: dict[str, Any] = field(default_factory=dict)
    code: int = 0
    seen: dict[str, Any] = field(default_factory=dict)
    errors: str = ""


def state(folder: Path) -> dict[str, Any]:
    """Everything of all files in a folder that could be changed: contents, times, modes, owners, links."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        facts = path.lstat()
        contents: Any = None
        if path.is_symlink():
            contents = str(path.readlink())
        elif path.is_file():
            contents = read(path)
        found[str(path.relative_to(folder))] = (
            contents,
            facts.st_mode,
            facts.st_uid,
            facts.st_gid,
            facts.st_nlink,
            facts.st_ino,
            facts.st_mtime_ns,
            facts.st_ctime_ns,
            # Listing a folder here changes its time of access, and whoever connects to a socket changes that.
            facts.st_atime_ns if stat.S_ISREG(facts.st_mode) else None,
        )
    return found


def read(path: Path) -> bytes:
    """A file's contents; its time of access stays."""
    with open(os.open(path, os.O_RDONLY | os.O_NOATIME), "rb") as file:
        return file.read()


def nobody() -> User:
    """Another user than root, who finds an interpreter of this version."""
    found = pwd.getpwnam("nobody")
    for interpreter in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}", "/usr/bin/python3"):
        if works_for(interpreter, found.pw_uid, found.pw_gid):
            return User("nobody", found.pw_uid, found.pw_gid, interpreter=interpreter)
    pytest.skip("no Python of this version that the user nobody may run")


def works_for(interpreter: str, user: int, group: int) -> bool:
    code = f"import sys, numpy; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    try:
        ran = subprocess.run(
            [interpreter, "-c", code],
            user=user,
            group=group,
            extra_groups=[],
            env=environment("/"),
            cwd="/",
            check=False,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return ran.returncode == 0


def environment(home: str) -> dict[str, str]:
    paths = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    return {**kept, "HOME": home, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module", params=["own", "own without the right to mount", "nobody"])
def user(request: pytest.FixtureRequest) -> User:
    own = User("own", os.getuid(), os.getgid())
    if request.param == "own":
        return own
    if os.getuid() != 0:
        pytest.skip("only root can be another user or give a right up")
    return replace(own, drop_right=True) if "right" in request.param else nobody()


@pytest.fixture
def place(user: User) -> Iterator[Path]:
    """A folder on this machine's disk that the user may enter."""
    with folder_for(user, None) as folder:
        yield folder


class folder_for:
    """A folder that a user may enter, removed afterwards."""

    def __init__(self, user: User, where: Path | None) -> None:
        self._user, self._where = user, where

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="vramfit-test-", dir=self._where))
        self._user.own(self.path)
        return self.path

    def __exit__(self, *error: object) -> None:
        for name in [path for path in self.path.rglob("*") if path.is_dir() and not path.is_symlink()]:
            name.chmod(0o700)
        shutil.rmtree(self.path)


def plant(area: Path, user: User) -> socket.socket:
    """Real files of every kind that the programs touch; returns a socket that somebody listens on."""
    for folder in ("checkpoint-1/inner", "checkpoint-2/inner", "checkpoint-3/inner", "again", "through"):
        (area / folder).mkdir(parents=True)
        (area / folder / "weights").write_text("weights", encoding="utf-8")
    (area / "mounted").mkdir()
    (area / "folder" / "mounted").mkdir(parents=True)
    names = "best.pt replaced.pt doomed.txt touched.txt read.txt opened.txt mode.txt read_only.txt mapped.bin"
    for name in (*names.split(), "gone_by_shell.txt", "moved_by_shell.txt", "gone_by_python.txt"):
        (area / name).write_text("real", encoding="utf-8")
    (area / "read_only.txt").chmod(0o444)
    (area / "link").symlink_to("best.pt")
    subprocess.run(
        [sys.executable, "-c", "import sqlite3; b = sqlite3.connect('data.db'); b.execute('create table runs"
         " (name)'); b.execute(\"insert into runs values ('real')\"); b.commit()"],
        cwd=area, check=True,
    )  # fmt: skip
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(area / "listening"))
    server.listen(16)
    everything = [area, *area.rglob("*")]
    user.own(*everything)
    for path in reversed(everything):
        os.utime(path, ns=(OLD, OLD), follow_symlinks=False)
    return server


def run(user: User, place: Path, program: str, **asked: Any) -> Ran:
    """Run one of the programs in a namespace, attended as `vramfit run` attends its child."""
    area, work = place / "area", place / "work"
    server = plant_in(area, user)
    for folder in (work, work / "files", work / "temporary"):
        folder.mkdir()
        user.own(folder)
    through = (str(area / "through"), str(area / "new-cache"), str(work))
    policy = FilePolicy(
        writes=asked.pop("writes", Writes.DISCARD),
        folder=str(work / "files"),
        temporary=str(work / "temporary"),
        through=through,
        cap_bytes=asked.pop("cap_bytes", 1 << 30),
    )
    before = state(area)
    request = {
        "area": str(area),
        "cwd": str(area),
        "program": program,
        "policy": to_plain(policy),
        "drop_right": user.drop_right,
        **asked,
    }
    as_user = {} if user.name == "own" else {"user": user.number, "group": user.group, "extra_groups": []}
    with server, attended(policy), open(place / "errors.txt", "w+", encoding="utf-8") as errors:
        done = subprocess.run(
            [user.interpreter, str(INSIDE), json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment(str(area)), **({"OPENBLAS_NUM_THREADS": "1"} if "submount" in asked else {})},
            check=False,
            timeout=120,
            text=True,
            **as_user,
        )
        errors.seek(0)
        told = errors.read()
    seen = json.loads(done.stdout) if done.stdout else {}
    if "why_not" in seen:
        pytest.skip(f"no namespace for {user.name}: {seen['why_not']}")
    return Ran(area=area, policy=policy, before=before, code=done.returncode, seen=seen, errors=told)


def plant_in(area: Path, user: User) -> socket.socket:
    area.mkdir()
    return plant(area, user)


def unchanged(ran: Ran, *new: str) -> None:
    """Every file is as before, times included, but those that were written through."""
    after, tops = state(ran.area), [(name,) for name in new]
    for name in [name for name in after if Path(name).parts[:1] in tops]:
        del after[name]
    before = {name: facts for name, facts in ran.before.items() if Path(name).parts[:1] not in tops}
    if new:  # a folder in which something was made through has another time
        del before["."], after["."]
    assert after == before


@pytest.fixture(scope="module")
def idioms(user: User) -> Iterator[Ran]:
    with folder_for(user, None) as folder:
        ran = run(user, folder, "idioms", writes=Writes.KEEP)
        assert ran.code == 0, ran.errors
        yield ran


def test_nothing_that_existed_is_changed(idioms: Ran) -> None:
    unchanged(idioms, "through", "new-cache")
    name = idioms.area.parent.name
    assert not Path("/var/tmp", f"{name}-elsewhere").exists()
    assert not (SHARED_MEMORY / f"{name}-shared").exists()
    assert not Path("/usr/vramfit-test").exists()


def test_the_program_finds_what_it_wrote(idioms: Ran) -> None:
    seen = idioms.seen
    assert seen["size_after_save"] == len("new best")
    assert seen["moved"] == "weights"
    assert seen["source_gone"]
    assert seen["again"] == []
    assert (seen["moved_away"], seen["moved_back"]) == ("far", "far")
    assert seen["hard_link"] == "new best"
    assert seen["rows"] == ["real", "virtual"]
    assert seen["mapped"] == "MMAP"
    assert seen["shared"] == "shared"
    assert seen["sparse"] == 1 << 36
    assert seen["by_others"] == {
        "by_shell.txt": "shell",
        "renamed_by_shell.txt": "real",
        "nested.txt": "nested",
        "forked.txt": "forked",
    }


def test_a_program_stays_where_it_is_and_who_it_is(idioms: Ran, user: User) -> None:
    assert idioms.seen["cwd"] == str(idioms.area)
    assert idioms.seen["relative"] == "real"
    assert idioms.seen["ids"] == [user.number, user.number, user.group]
    assert idioms.seen["capabilities_as_before"]
    assert idioms.errors == "to standard error\n"  # a descriptor that was open leads where it led


def test_it_is_refused_what_it_was_refused_before(idioms: Ran, user: User) -> None:
    if user.number == 0:
        assert idioms.seen["read_only_file"] == "ok"
        assert idioms.seen["system_folder"] == "ok"
    else:
        assert idioms.seen["read_only_file"] == "EACCES"
        assert idioms.seen["system_folder"] == "EROFS"
    assert idioms.seen["rename_onto_full"] == "ENOTEMPTY"


def test_sockets_that_others_listen_on_are_reached(idioms: Ran) -> None:
    assert idioms.seen["socket_of_others"] == "ok"


def test_paths_that_are_written_through_are_real(idioms: Ran) -> None:
    assert (idioms.area / "through" / "out.txt").read_text() == "through"
    # This one did not exist: it is moved to its place when the program has ended.
    assert (idioms.area / "new-cache" / "deep" / "blob").read_text() == "blob"
    assert not any("through" in path or "new-cache" in path for path in idioms.seen["changes"])


def test_changes_are_told(idioms: Ran, user: User) -> None:
    area = str(idioms.area)
    changes = {
        os.path.relpath(path, area): tuple(change)
        for path, change in idioms.seen["changes"].items()
        if path.startswith(area)
    }
    expected = {
        "best.pt": ("replaced", 8),
        "replaced.pt": ("replaced", 5),
        "copy.pt": ("written", 8),
        "hard.pt": ("written", 8),
        "sparse.pt": ("written", 1 << 36),
        "doomed.txt": ("deleted", 4),
        "checkpoint-1": ("deleted", 7),
        "checkpoint-2": ("deleted", 7),
        "checkpoint-3": ("deleted", 7),
        "made": ("folder", 0),
        "made/deep": ("folder", 0),
        "made/deep/file": ("written", 4),
        "again/weights": ("deleted", 7),
        "again/other": ("written", 1),
        "moved": ("folder", 0),
        "moved/inner": ("folder", 0),
        "moved/inner/weights": ("written", 7),
        "full": ("folder", 0),
        "full/x": ("written", 0),
        "full/checkpoint-3": ("folder", 0),
        "full/checkpoint-3/inner": ("folder", 0),
        "full/checkpoint-3/inner/weights": ("written", 7),
        "far.txt": ("written", 3),
        "touched.txt": ("metadata", 4),
        "mode.txt": ("metadata", 4),
        "by_shell.txt": ("written", 6),
        "gone_by_shell.txt": ("deleted", 4),
        "moved_by_shell.txt": ("deleted", 4),
        "renamed_by_shell.txt": ("written", 4),
        "nested.txt": ("written", 6),
        "gone_by_python.txt": ("deleted", 4),
        "forked.txt": ("written", 6),
        "data.db": ("replaced", 8192),
        "mapped.bin": ("replaced", 4),
    }
    if user.number == 0:
        expected["read_only.txt"] = ("replaced", 1)
    assert changes == expected


def test_mounts_below_a_folder_are_covered_too(user: User) -> None:
    """The kernel refuses a lower folder with mounts of an outer namespace below it: it is taken apart."""
    with folder_for(user, Path("/var/tmp")) as place:
        area = place / "area"
        ran = run(
            user, place, "submounts", submount=[str(area / "mounted"), str(area / "folder" / "mounted")]
        )
        assert ran.code == 0, ran.errors
        assert ran.seen["read"] == "real"
        assert ran.seen["link"] == "best.pt"
        assert ran.seen["onto_a_mount"] == "EBUSY"
        assert ran.seen["rename_between_mounts"] == "EXDEV"  # as it was before
        told = {os.path.relpath(path, area): kind for path, (kind, _) in ran.seen["changes"].items()}
        assert told == {
            "mounted/below.txt": "replaced",
            "mounted/new.txt": "written",
            "folder/mounted/below.txt": "deleted",
            "folder/beside": "folder",
            "best.pt": "replaced",
            "doomed.txt": "replaced",
            "checkpoint-1/inner/weights": "deleted",
        }
        unchanged(ran)


def test_a_killed_program_leaves_nothing_but_what_it_wrote_through(user: User, place: Path) -> None:
    ran = run(user, place, "killed")
    assert ran.code == -signal.SIGKILL
    unchanged(ran, "new-cache")
    assert (ran.area / "new-cache" / "blob").read_text() == "blob"
    assert list(Path(ran.policy.folder).iterdir()) == []
    assert ran.policy.folder not in Path("/proc/self/mountinfo").read_text()


def test_kept_files_lie_under_their_paths(idioms: Ran, user: User) -> None:
    ran = idioms
    kept = Path(ran.policy.folder + str(ran.area))
    assert (kept / "best.pt").read_text() == "new best"
    assert (kept / "made" / "deep" / "file").read_bytes() == b"1234"
    assert (kept / "sparse.pt").stat().st_size == 1 << 36
    assert (kept / "sparse.pt").stat().st_blocks == 0
    assert not (kept / "doomed.txt").exists()
    assert (
        Path(ran.policy.folder) / "dev" / "shm" / f"{ran.area.parent.name}-shared"
    ).read_text() == "shared"
    listing = (Path(ran.policy.folder) / LISTING).read_text().splitlines()
    assert f"deleted\t4\t{ran.area}/doomed.txt" in listing
    assert f"replaced\t8\t{ran.area}/best.pt" in listing
    assert {path.stat().st_uid for path in kept.rglob("*") if not path.is_symlink()} == {user.number}
    assert not list(Path(ran.policy.folder).glob(".*"))


def test_contents_beyond_the_cap_are_dropped_and_told(user: User, place: Path) -> None:
    ran = run(user, place, "large", cap_bytes=16 << 20)
    assert ran.code == 0, ran.errors
    assert ran.seen["sizes"] == [24 << 20, 8 << 20, 1000]
    assert ran.seen["occupied"][0] == 0
    assert ran.seen["occupied"][1] == 8 << 20
    (note,) = ran.seen["notes"]
    assert "first.bin" in note
    assert "16.00 MiB" in note


def test_overlays_lie_in_memory_where_the_folder_cannot_hold_them(user: User, place: Path) -> None:
    """As in a container whose only file system is an overlay itself."""
    ran = run(user, place, "idioms", refuse_folder=True)
    assert ran.code == 0, ran.errors
    assert ran.seen["changes"][f"{ran.area}/best.pt"] == ["replaced", 8]
    (note,) = ran.seen["notes"]
    assert "in memory" in note
    assert (ran.area / "new-cache" / "deep" / "blob").read_text() == "blob"
    unchanged(ran, "through", "new-cache")


def test_files_in_shared_memory_and_an_overlay_on_it(user: User) -> None:
    with folder_for(user, SHARED_MEMORY) as folder:
        ran = run(user, folder, "idioms", elsewhere=str(SHARED_MEMORY))
        assert ran.code == 0, ran.errors
        assert ran.seen["changes"][f"{ran.area}/best.pt"] == ["replaced", 8]
        unchanged(ran, "through", "new-cache")


def test_a_program_that_closes_all_descriptors() -> None:
    own = User("own", os.getuid(), os.getgid())
    with folder_for(own, None) as place:
        ran = run(own, place, "closing")
        assert ran.code == 0, ran.errors
        assert ran.seen["changes"] == {}
        assert "closed all descriptors" in ran.seen["notes"][0]
        unchanged(ran)


def test_what_cannot_be_put_in_its_place_is_told(tmp_path: Path) -> None:
    """The results of a run are not lost by it."""
    kept = tmp_path / "files" / PLACE / "upper"
    kept.mkdir(parents=True)
    (kept / "cache").write_text("x", encoding="utf-8")
    (tmp_path / "blocked").touch()
    point = str(tmp_path / "blocked")
    overlay = MountedOverlay(point=point, upper=str(kept), in_memory=False, device="0:0")
    missing = (f"{point}/cache",)
    Manifest(folder=str(kept.parent), overlays=(overlay,), missing=missing).write()
    policy = FilePolicy(writes=Writes.DISCARD, folder=str(tmp_path / "files"), temporary=str(tmp_path))
    with pytest.warns(UserWarning, match="could not be put there"):
        settle(policy)
    assert list((tmp_path / "files").iterdir()) == []
