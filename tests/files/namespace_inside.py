"""Enters a namespace as `vramfit run`'s child does, does what programs do, and prints what it saw as JSON.

Started by test_namespace.py as ``python namespace_inside.py REQUEST``, a JSON object; see `main`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vramfit.files import FilePolicy
from vramfit.files.namespace import Namespace, syscalls, ways, why_not
from vramfit.files.namespace.mounts import is_under, seen_mounts
from vramfit.plain import from_plain


def main(request: dict[str, Any]) -> None:
    """Prepare the process as asked, enter, run one of the `PROGRAMS`, and print what it returned."""
    if request.get("drop_right"):  # root as in a container that may not mount
        have = ways.capabilities()
        kept = have.permitted & ~(1 << 21)
        syscalls.drop_from_bound(21)
        syscalls.set_capabilities(effective=kept, permitted=kept, inheritable=0)
    if request.get("submount"):
        mount_below(request["submount"])
    if request.get("refuse_folder"):
        refuse_folder()
    os.chdir(request["cwd"])
    policy = from_plain(request["policy"], FilePolicy)
    reason = why_not(policy)
    if reason is not None:
        print(json.dumps({"why_not": reason}))
        return
    capabilities = ways.capabilities()
    protection = Namespace(policy)
    protection.__enter__()
    os.environ["ELSEWHERE"] = request.get("elsewhere", "/var/tmp")
    seen = PROGRAMS[request["program"]](Path(request["area"]))
    changes = protection.changes()
    seen["changes"] = {each.path: [each.kind.value, each.size_bytes] for each in changes.entries}
    seen["notes"] = changes.notes
    seen["capabilities_as_before"] = ways.capabilities() == capabilities
    seen["ids"] = [os.getuid(), os.geteuid(), os.getgid()]
    print(json.dumps(seen))


def mount_below(points: list[str]) -> None:
    """In a namespace of the test's own, lay file systems on folders, as if they had always been there."""
    before = ways.capabilities()
    way = next(way for way in ways.possible_ways() if way.right is not ways.Right.ALL_IDS)
    ways.enter(way)
    for point in points:
        syscalls.mount("tmpfs", point, "tmpfs", 0, "mode=0755")
        Path(point, "below.txt").write_text("real", encoding="utf-8")
    ways.give_back(way, before)


def refuse_folder() -> None:
    """Let overlayfs refuse an upper folder on a disk, as it refuses one on an overlay."""
    mount = syscalls.mount

    def refuse(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
        if kind == "overlay":
            upper = next(part for part in data.split(",") if part.startswith("upperdir=")).partition("=")[2]
            seen = [each for each in seen_mounts() if is_under(upper, each.point)]
            if max(seen, key=lambda each: len(each.point)).kind != "tmpfs":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), target)
        mount(source, target, kind, flags, data)

    syscalls.mount = refuse


def outcome(call: Any, *arguments: Any) -> str:
    """What a call comes to: ``ok`` or the error's name."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


def idioms(area: Path) -> dict[str, Any]:
    """What programs do with files."""
    seen: dict[str, Any] = {"cwd": os.getcwd(), "relative": Path("best.pt").read_text(encoding="utf-8")}
    # replaced, written, deleted
    Path("best.pt").write_text("new best", encoding="utf-8")
    Path("temporary.pt").write_text("newer", encoding="utf-8")
    Path("temporary.pt").replace("replaced.pt")
    (area / "made" / "deep").mkdir(parents=True)
    (area / "made" / "deep" / "file").write_bytes(b"1234")
    shutil.rmtree(area / "checkpoint-1")
    Path("doomed.txt").unlink()
    shutil.copyfile("best.pt", "copy.pt")
    seen["size_after_save"] = os.path.getsize(area / "copy.pt")
    # a folder that is removed and made again
    shutil.rmtree(area / "again")
    (area / "again").mkdir()
    seen["again"] = os.listdir(area / "again")
    (area / "again" / "other").write_text("x", encoding="utf-8")
    # a folder that existed is renamed
    os.rename(area / "checkpoint-2", area / "moved")
    seen["moved"] = (area / "moved" / "inner" / "weights").read_text(encoding="utf-8")
    seen["source_gone"] = not (area / "checkpoint-2").exists()
    (area / "full").mkdir()
    (area / "full" / "x").touch()
    seen["rename_onto_full"] = outcome(os.rename, area / "checkpoint-3", area / "full")
    seen["shutil_move"] = Path(shutil.move(area / "checkpoint-3", area / "full")).name
    # between folders that were one file system
    other = Path(os.environ["ELSEWHERE"]) / f"{area.parent.name}-elsewhere"
    Path("far.txt").write_text("far", encoding="utf-8")
    os.replace("far.txt", other)
    seen["moved_away"] = other.read_text(encoding="utf-8")
    os.replace(other, area / "far.txt")
    seen["moved_back"] = (area / "far.txt").read_text(encoding="utf-8")
    os.link("best.pt", "hard.pt")
    seen["hard_link"] = Path("hard.pt").read_text(encoding="utf-8")
    # only touched, only read, only opened for writing
    os.utime("touched.txt", (1, 1))
    Path("read.txt").read_text(encoding="utf-8")
    with open("opened.txt", "r+b"):
        pass
    Path("mode.txt").chmod(0o600)
    # a sparse checkpoint
    with open("sparse.pt", "wb") as file:
        file.truncate(1 << 36)
    seen["sparse"] = os.path.getsize("sparse.pt")
    seen |= writers(area) | system(area)
    return seen


def writers(area: Path) -> dict[str, Any]:
    """Writers that no patch of Python sees."""
    seen: dict[str, Any] = {}
    subprocess.run(["sh", "-c", "echo shell > by_shell.txt; rm gone_by_shell.txt"], check=True)
    os.system("mv moved_by_shell.txt renamed_by_shell.txt")
    nested = "open('nested.txt', 'w').write('nested'); import os; os.remove('gone_by_python.txt')"
    subprocess.run([sys.executable, "-I", "-c", nested], check=True)
    child = os.fork()
    if child == 0:
        Path("forked.txt").write_text("forked", encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    seen["by_others"] = {
        name: Path(name).read_text(encoding="utf-8").strip()
        for name in ("by_shell.txt", "renamed_by_shell.txt", "nested.txt", "forked.txt")
    }
    return seen


def system(area: Path) -> dict[str, Any]:
    """Locks, maps, databases, sockets, pipes, shared memory."""
    seen: dict[str, Any] = {}
    with sqlite3.connect("data.db") as base:
        base.execute("insert into runs values ('virtual')")
        seen["rows"] = [row[0] for row in base.execute("select name from runs")]
    base.close()
    with open("mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        fcntl.flock(file, fcntl.LOCK_EX)
        mapped[:4] = b"MMAP"
    seen["mapped"] = Path("mapped.bin").read_bytes()[:4].decode()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{folder}/socket")
        os.mkfifo(f"{folder}/pipe")
    with socket.socket(socket.AF_UNIX) as client:
        seen["socket_of_others"] = outcome(client.connect, str(area / "listening"))
    shared = Path("/dev/shm") / f"{area.parent.name}-shared"
    shared.write_text("shared", encoding="utf-8")
    seen["shared"] = shared.read_text(encoding="utf-8")
    seen["read_only_file"] = outcome(Path("read_only.txt").write_text, "x", "utf-8")
    seen["system_folder"] = outcome(Path("/usr/vramfit-test").write_text, "x", "utf-8")
    Path("through/out.txt").write_text("through", encoding="utf-8")
    Path("new-cache/deep").mkdir(parents=True)
    Path("new-cache/deep/blob").write_text("blob", encoding="utf-8")
    print("to standard error", file=sys.stderr)
    return seen


def submounts(area: Path) -> dict[str, Any]:
    """Writes beside, on and below mounts of a folder."""
    seen: dict[str, Any] = {"read": Path("mounted/below.txt").read_text(encoding="utf-8")}
    Path("mounted/below.txt").write_text("changed", encoding="utf-8")
    Path("mounted/new.txt").write_text("new", encoding="utf-8")
    Path("folder/mounted/below.txt").unlink()
    Path("folder/beside").mkdir()
    Path("best.pt").write_text("new best", encoding="utf-8")
    Path("temporary").write_text("new", encoding="utf-8")
    os.replace("temporary", "doomed.txt")
    (area / "checkpoint-1" / "inner" / "weights").unlink()
    seen["link"] = os.readlink("link")
    seen["onto_a_mount"] = outcome(os.rmdir, "mounted")
    seen["rename_between_mounts"] = outcome(os.rename, "best.pt", "mounted/best.pt")
    seen["sum"] = hashlib.sha256(Path("mounted/new.txt").read_bytes()).hexdigest()
    return seen


def killed(area: Path) -> dict[str, Any]:
    """Written, then no chance to tidy."""
    Path("best.pt").write_text("new best", encoding="utf-8")
    shutil.rmtree(area / "checkpoint-1")
    Path("new-cache").mkdir()
    Path("new-cache/blob").write_text("blob", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def large(area: Path) -> dict[str, Any]:
    """Files that occupy much: the parent looks every half a second."""
    names = ("first.bin", "second.bin", "small.bin")
    for name, size in zip(names, (24 << 20, 8 << 20, 1000), strict=True):
        Path(name).write_bytes(b"\1" * size)
    ends = time.monotonic() + 30
    while os.stat("first.bin").st_blocks and time.monotonic() < ends:
        time.sleep(0.1)
    facts = [os.stat(name) for name in names]
    return {"sizes": [each.st_size for each in facts], "occupied": [each.st_blocks * 512 for each in facts]}


def closing(area: Path) -> dict[str, Any]:
    """What daemons do."""
    Path("best.pt").write_text("new best", encoding="utf-8")
    os.closerange(3, 1 << 16)
    return {}


PROGRAMS = {each.__name__: each for each in (idioms, submounts, killed, large, closing)}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
