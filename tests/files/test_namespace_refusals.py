"""Where no namespace can be entered: the reason is told, and the trial leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vramfit.errors import EnvironmentUnfitError
from vramfit.files import Backend, make_policy, protect
from vramfit.files.namespace import Namespace, entry, islands, syscalls, tree, why_not
from vramfit.files.namespace.mounts import below, mount_of, parse_mounts, seen_mounts

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")

Patch = pytest.MonkeyPatch


def fail(code: int, name: str | None = None) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), name or str(arguments[1]))

    return call


def settings(patch: Patch, folder: Path, **values: str) -> None:
    """Let /proc/sys hold these values alone, double underscores between folders."""
    for name, value in values.items():
        file = folder.joinpath(*name.split("__"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n", encoding="utf-8")
    patch.setattr(entry, "_SETTINGS", folder)


def test_a_container_without_namespaces(monkeypatch: Patch, tmp_path: Path) -> None:
    settings(monkeypatch, tmp_path)
    monkeypatch.setattr(syscalls, "unshare", fail(errno.EPERM, "unshare"))
    assert why_not() == (
        "this machine or container allows no user namespaces (unshare: operation not permitted)"
    )


def test_namespaces_switched_off(monkeypatch: Patch, tmp_path: Path) -> None:
    settings(monkeypatch, tmp_path, kernel__unprivileged_userns_clone="0")
    monkeypatch.setattr(syscalls, "unshare", fail(errno.EPERM, "unshare"))
    assert "kernel.unprivileged_userns_clone is 0" in (why_not() or "")


def test_no_more_namespaces(monkeypatch: Patch, tmp_path: Path) -> None:
    settings(monkeypatch, tmp_path)
    monkeypatch.setattr(syscalls, "unshare", fail(errno.ENOSPC, "unshare"))
    assert "user.max_user_namespaces" in (why_not() or "")


def test_apparmor_of_ubuntu(monkeypatch: Patch, tmp_path: Path) -> None:
    """unshare is granted there, mounting is not."""
    settings(monkeypatch, tmp_path, kernel__apparmor_restrict_unprivileged_userns="1")
    monkeypatch.setattr(syscalls, "mount", fail(errno.EACCES))
    assert "AppArmor" in (why_not() or "")


def test_a_kernel_without_overlayfs(monkeypatch: Patch) -> None:
    mount = syscalls.mount

    def refuse(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
        if kind == "overlay":
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), target)
        mount(source, target, kind, flags, data)

    monkeypatch.setattr(syscalls, "mount", refuse)
    assert why_not() in ("this kernel has no overlayfs", refused())


def refused() -> str:
    """Where this machine allows no namespace at all, that is told first."""
    return "this machine or container allows no user namespaces (unshare: operation not permitted)"


def test_overlays_that_do_not_keep_files_apart(monkeypatch: Patch) -> None:
    """An overlay without marks for removed folders would show what was removed."""
    mount = syscalls.mount

    def bind(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
        if kind == "overlay":
            source, kind, flags = data.split(",")[0].partition("=")[2], None, syscalls.BIND
        mount(source, target, kind, flags, "" if kind is None else data)

    monkeypatch.setattr(syscalls, "mount", bind)
    assert "not kept apart" in (why_not() or "") or why_not() == refused()


def test_an_old_kernel(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="5.10.0-28-amd64"))
    assert why_not() == "overlays need Linux 5.12, this is 5.10"


def test_another_system(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == "namespaces are Linux's, this is darwin"


def test_a_trial_that_is_killed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(syscalls, "unshare", lambda flags: os.kill(os.getpid(), signal.SIGKILL))
    assert why_not() == "a process that tried it was killed"


def test_threads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(entry, "_try", lambda *arguments: None)
    ready = threading.Event()
    thread = threading.Thread(target=ready.wait)
    thread.start()
    try:
        assert "threads run in this process" in (why_not() or "")
    finally:
        ready.set()
        thread.join()


def test_strangers_files_where_the_program_works(tmp_path: Path) -> None:
    """A user namespace knows one group: files of another one could be read and not replaced."""
    (tmp_path / "file").touch()
    owner = tmp_path.stat().st_uid
    assert islands.uncoverable(str(tmp_path), lambda user, group: user == owner) is None
    assert str(tmp_path) in (islands.uncoverable(str(tmp_path), lambda user, group: False) or "")
    knows = {tmp_path.stat().st_gid: True}
    tmp_path.chmod(0o755)
    if os.getuid() == 0:
        os.chown(tmp_path / "file", 0, 12345)
        told = islands.uncoverable(str(tmp_path), lambda user, group: group in knows) or ""
        assert str(tmp_path / "file") in told
        assert "12345" in told


def test_the_trial_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    mounts, here, children = seen_mounts(), Path.cwd(), _children()
    why_not()
    assert seen_mounts() == mounts
    assert Path.cwd() == here
    assert list(tmp_path.iterdir()) == []
    assert _children() == children


def _children() -> set[int]:
    """Processes of this one, those that ended and that nobody waited for among them."""
    listed = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    return {int(pid) for line in listed for pid in line.split()}


def test_what_is_asked_for_and_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(syscalls, "unshare", fail(errno.EPERM, "unshare"))
    policy = make_policy("discard", workplace=tmp_path, backend=Backend.NAMESPACE)
    with pytest.raises(EnvironmentUnfitError, match="namespace"):
        protect(policy, in_child=True)
    with pytest.raises(EnvironmentUnfitError, match="namespace"):
        Namespace(policy).__enter__()


def test_else_patches_protect_and_tell_why(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(syscalls, "unshare", fail(errno.EPERM, "unshare"))
    protection = protect(make_policy("discard", workplace=tmp_path), in_child=True)
    assert protection.backend is Backend.PATCHES


MOUNTS = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 27 0:21 / /proc rw - proc proc rw
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
30 25 0:27 / /dev/shm rw - tmpfs tmpfs rw
40 27 8:1 / /data rw,nosuid - xfs /dev/sda1 rw
41 40 8:2 / /data/my\040models ro - ext4 /dev/sdb ro
42 27 8:3 / /home rw - ext4 /dev/sdc rw
43 42 8:4 / /home/me rw - ext4 /dev/sdd rw
44 42 8:5 / /home/me/.cache rw - ext4 /dev/sde rw
45 42 8:6 / /home rw - ext4 /dev/sdf rw
""".strip()


def test_mounts_that_are_seen(monkeypatch: Patch, tmp_path: Path) -> None:
    """A mount on the same point, or on a folder above, hides another."""
    file = tmp_path / "mountinfo"
    file.write_text(MOUNTS, encoding="utf-8")
    monkeypatch.setattr("vramfit.files.namespace.mounts.MOUNTINFO", str(file))
    seen = seen_mounts()
    assert [(mount.point, mount.number) for mount in seen] == [
        ("/", 27),
        ("/data", 40),
        ("/data/my models", 41),
        ("/dev", 24),
        ("/dev/shm", 30),
        ("/home", 45),
        ("/proc", 22),
    ]
    assert [mount.point for mount in seen if mount.is_writable] == ["/", "/data", "/dev/shm", "/home"]
    inside = mount_of("/data/my models/x", seen)
    assert inside is not None
    assert inside.number == 41
    assert [mount.number for mount in below("/", seen)] == [40, 24, 45, 22]
    assert "nosuid" in parse_mounts(MOUNTS)[5].options


def test_sockets_of_this_machine(monkeypatch: Patch, tmp_path: Path) -> None:
    table = tmp_path / "unix"
    table.write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "000000005221577c: 00000003 00000000 00000000 0001 03  1132\n"
        "00000000aaaaaaaa: 00000002 00000000 00010000 0001 01 12345 /run/a folder/socket\n"
        "00000000bbbbbbbb: 00000002 00000000 00010000 0001 01    17 @abstract\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(tree, "_SOCKETS", str(table))
    assert tree.listening() == ["/run/a folder/socket"]
    shutil.rmtree(tmp_path)
    assert tree.listening() == []
