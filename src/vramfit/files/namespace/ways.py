"""The ways into a mount namespace of one's own: with a right to mount that a process has, or in a user namespace.

NOTE [Ways]

A process may mount what it likes in a mount namespace of its own if it has CAP_SYS_ADMIN. Root often has it; anybody
else gets it in a new user namespace, which holds for that namespace alone. Two things depend on the way:

- Ids. A user namespace that an unprivileged process makes knows one user and one group, its own. All other owners are
  strangers there: files of theirs are read and written as their modes allow, but overlayfs cannot copy them up
  (EOVERFLOW, fs/overlayfs/copy_up.c: ovl_copy_up_one). With CAP_SETUID and CAP_SETGID every id can be kept.
- Marks. overlayfs marks folders with extended attributes: ``trusted.overlay.*`` where the process is root of the whole
  machine, ``user.overlay.*`` (Linux 5.11) in a user namespace, which leaves the renaming of folders out.

The namespace's capabilities are given back as soon as all is mounted: a program must be refused what it would be
refused without us, such as writing to a file that its own user may only read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vramfit.files.namespace import syscalls

_SETGID, _SETUID, _SYS_ADMIN = 6, 7, 21  # linux/capability.h
_STATUS = "/proc/self/status"
_ID_MAP = "/proc/self/uid_map"


class Right(Enum):
    """Where the right to mount comes from."""

    HELD = "held"
    """The process has it."""
    ALL_IDS = "all ids"
    """A user namespace that knows every id this process knows."""
    OWN_ID = "own id"
    """A user namespace that knows this user and this group."""


class Marks(Enum):
    """Which extended attributes overlayfs marks folders with."""

    TRUSTED = "trusted"
    USER = "user"

    @property
    def options(self) -> str:
        """Mount options that go with them."""
        if self is Marks.TRUSTED:
            return "redirect_dir=on,metacopy=off,index=on"
        return "userxattr,index=off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way in."""

    right: Right
    marks: Marks


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Sets of capabilities of this process, each as bits."""

    permitted: int
    effective: int
    inheritable: int
    bound: int

    def has(self, *numbers: int) -> bool:
        """Whether all of these are effective."""
        return all(self.effective >> number & 1 for number in numbers)


def capabilities() -> Capabilities:
    """The capabilities of this process, by /proc/self/status."""
    lines = dict(
        line.split(":\t", 1) for line in Path(_STATUS).read_text("utf-8").splitlines() if ":\t" in line
    )
    permitted, effective, inheritable, bound = (
        int(lines[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapBnd")
    )
    return Capabilities(permitted=permitted, effective=effective, inheritable=inheritable, bound=bound)


def possible_ways() -> list[Way]:
    """The ways that could be tried, the best first."""
    have = capabilities()
    ways = []
    if have.has(_SYS_ADMIN):
        ways += [Way(right=Right.HELD, marks=marks) for marks in (Marks.TRUSTED, Marks.USER)]
    if have.has(_SETUID, _SETGID):
        ways.append(Way(right=Right.ALL_IDS, marks=Marks.USER))
    ways.append(Way(right=Right.OWN_ID, marks=Marks.USER))
    return ways


def knows(way: Way, user: int, group: int) -> bool:
    """Whether files of a user and a group can be copied up; only valid before the namespace is entered."""
    if way.right is Right.OWN_ID:
        return user == os.getuid() and group == os.getgid()
    return _is_mapped(user, _ID_MAP) and _is_mapped(group, _ID_MAP.replace("uid", "gid"))


def enter(way: Way) -> None:
    """Take this process into namespaces of its own, with every capability in them.

    Raises:
        OSError: the system refuses.
    """
    if way.right is Right.HELD:
        syscalls.unshare(syscalls.NEW_MOUNTS)
    elif way.right is Right.ALL_IDS:
        _enter_with_all_ids()
    else:
        user, group = os.getuid(), os.getgid()
        syscalls.unshare(syscalls.NEW_USER | syscalls.NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny", "utf-8")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "utf-8")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "utf-8")
    syscalls.mount("none", "/", flags=syscalls.RECURSIVE | syscalls.PRIVATE)


def give_back(way: Way, before: Capabilities) -> None:
    """Leave this process only the capabilities that it had before it entered.

    Raises:
        OSError: the system refuses.
    """
    if way.right is Right.HELD:
        return
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text("utf-8"))
    for number in range(last + 1):
        if not before.bound >> number & 1:
            syscalls.drop_from_bound(number)
    syscalls.set_capabilities(
        effective=before.effective, permitted=before.permitted, inheritable=before.inheritable
    )


def _enter_with_all_ids() -> None:
    """Enter with the maps written by a process that stays outside: inside nobody has a right over ids outside."""
    process, (ready, go) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(go)
            if os.read(ready, 1):
                for kind in ("uid", "gid"):
                    Path(f"/proc/{process}/{kind}_map").write_text(_same_ids(kind), "utf-8")
                code = 0
        finally:
            os._exit(code)
    try:
        os.close(ready)
        syscalls.unshare(syscalls.NEW_USER | syscalls.NEW_MOUNTS)
        os.write(go, b"1")
    finally:
        os.close(go)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise PermissionError(1, "the ids of this user namespace cannot be kept")


def _same_ids(kind: str) -> str:
    """A map of each id that is known here to itself."""
    lines = Path(f"/proc/self/{kind}_map").read_text("utf-8").splitlines()
    return "\n".join("{0} {0} {2}".format(*line.split()) for line in lines)


def _is_mapped(number: int, file: str) -> bool:
    for line in Path(file).read_text("utf-8").splitlines():
        first, _, count = (int(field) for field in line.split())
        if first <= number < first + count:
            return True
    return False
