"""What is mounted where, by /proc/self/mountinfo: which mounts are seen, and which could be written to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = "/proc/self/mountinfo"
SHARED_MEMORY = "/dev/shm"

_PSEUDO = {
    *(
        "autofs",
        "binder",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
    ),
    *("efivarfs", "fuse.gvfsd-fuse", "fuse.lxcfs", "fuse.portal", "fusectl", "hugetlbfs", "mqueue", "nsfs"),
    *("proc", "pstore", "resctrl", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
}
"""File systems whose files are the kernel's own or a service's: nothing of the user's lies there."""
_KERNEL = ("/proc", "/sys", "/dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo, see proc_pid_mountinfo(5).

    Attributes:
        parent: the id of the mount that it lies on.
        device: major and minor number of the file system.
        root: which folder of the file system is mounted.
        options: of this mount and of its file system.
        kind: of file system.
    """

    number: int
    parent: int
    device: str
    root: str
    point: str
    options: frozenset[str]
    kind: str

    @property
    def is_pseudo(self) -> bool:
        """Whether it holds nothing of the user's. Shared memory holds files like any other."""
        if self.point == SHARED_MEMORY:
            return False
        return self.kind in _PSEUDO or any(is_under(self.point, folder) for folder in _KERNEL)

    @property
    def is_writable(self) -> bool:
        """Whether anybody could write to a user's files there."""
        return "ro" not in self.options and not self.is_pseudo


def is_under(path: str, folder: str) -> bool:
    """Whether an absolute path is a folder's own or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of a mountinfo, in its order."""
    return [_mount(line) for line in text.splitlines()]


def seen_mounts() -> list[Mount]:
    """The mounts that paths of this process lead to, parents first."""
    mounts = parse_mounts(Path(MOUNTINFO).read_text(encoding="utf-8", errors="surrogateescape"))
    return sorted(_seen(mounts), key=lambda mount: mount.point)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path without symbolic links lies on."""
    return max(
        (mount for mount in mounts if is_under(path, mount.point)),
        key=lambda mount: len(mount.point),
        default=None,
    )


def below(folder: str, mounts: Iterable[Mount]) -> list[Mount]:
    """The topmost mounts strictly below a folder."""
    inside = [mount for mount in mounts if mount.point != folder and is_under(mount.point, folder)]
    return [
        mount
        for mount in inside
        if not any(other is not mount and is_under(mount.point, other.point) for other in inside)
    ]


def _mount(line: str) -> Mount:
    fields = line.split(" ")
    rest = fields.index("-", 6)
    return Mount(
        number=int(fields[0]),
        parent=int(fields[1]),
        device=fields[2],
        root=_unescape(fields[3]),
        point=_unescape(fields[4]),
        options=frozenset(fields[5].split(",")) | frozenset(fields[rest + 3].split(",")),
        kind=fields[rest + 1],
    )


def _unescape(field: str) -> str:
    """Undo the octal escapes of spaces, tabs, line ends and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _seen(mounts: list[Mount]) -> list[Mount]:
    """Mounts that no other hides by lying on the same point or on a folder above."""
    by_number = {mount.number: mount for mount in mounts}
    children: dict[int, list[Mount]] = {}
    for mount in mounts:
        children.setdefault(mount.parent, []).append(mount)

    def reached(mount: Mount) -> bool:
        parent = by_number.get(mount.parent)
        if parent is None or parent is mount:
            return True
        siblings = (other for other in children[mount.parent] if other is not mount)
        return reached(parent) and not any(is_under(mount.point, other.point) for other in siblings)

    def on_top(mount: Mount) -> bool:
        return not any(other.point == mount.point for other in children.get(mount.number, ()))

    return [mount for mount in mounts if on_top(mount) and reached(mount)]


def flags_of(mount: Mount) -> frozenset[str]:
    """What else a mount forbids, and one in its place must: running programs, devices, set-user-id."""
    return mount.options & {"nosuid", "nodev", "noexec"}
