"""How far this process' control group is from its memory limit, before the kernel ends a process of it.

NOTE [What counts]: ``memory.current`` has file pages too, which the kernel drops before it ends anybody. Those that
were not used lately (``inactive_file`` of memory.stat) are taken off, as Kubernetes does for its working set. A process
is in a group and in all above it; the limit that is nearest counts. Of version 2 ``memory.high`` is a limit as well:
beyond it processes are slowed down until they hardly move. Files and their units:
docs.kernel.org/admin-guide/cgroup-v2.html (memory interface files), cgroup-v1/memory.html, and accounting/psi.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vramfit.units import format_bytes

_NO_LIMIT = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit: 8 EiB less a page."""

_V2, _V1 = "cgroup2", "cgroup"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMemory:
    """The memory of one control group, in bytes.

    Attributes:
        path: its folder.
        limit: the nearest of its limits.
        used: what it holds, file pages that can be dropped taken off.
        cache: those file pages.
        at_limit: how often it met the limit (``max`` of memory.events, or memory.failcnt).
        killed: processes that the kernel has ended for it; None where it does not tell.
        stalled: percent of the last ten seconds in which some process waited for memory; None where it does not tell.
    """

    path: Path
    limit: int
    used: int
    cache: int
    at_limit: int = 0
    killed: int | None = None
    stalled: float | None = None

    @property
    def left(self) -> int:
        """Bytes up to the limit."""
        return max(0, self.limit - self.used)

    @property
    def share(self) -> float:
        """Of the limit that is used, from 0 on."""
        return self.used / self.limit if self.limit else 1.0

    def __str__(self) -> str:
        stall = (
            ""
            if self.stalled is None
            else f", {self.stalled:.0f} % of the last 10 s spent waiting for memory"
        )
        return (
            f"{format_bytes(self.used)} of the {format_bytes(self.limit)} that the control group {self.path} may hold, "
            f"{format_bytes(self.left)} left{stall}"
        )


class ControlGroups:
    """The control groups of a process that limit its memory.

    Args:
        pid: of the process, or ``self``.
        root: of the file system, for tests.
    """

    def __init__(self, pid: int | str = "self", root: Path = Path("/")) -> None:
        self._folders = tuple(_folders(pid, root))

    def nearest(self) -> GroupMemory | None:
        """The group that is nearest to its limit; None where none has one, or the system has no control groups."""
        known = [
            memory for folder, version in self._folders if (memory := _memory(folder, version)) is not None
        ]
        return min(known, key=lambda one: one.left, default=None)


def _folders(pid: int | str, root: Path) -> Iterator[tuple[Path, str]]:
    """The folder of each group of a process, from its own up, with the version."""
    try:
        # Paths of any bytes are in there, of file systems that have nothing to do with us.
        groups = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8", errors="surrogateescape")
        mounts = (root / "proc" / str(pid) / "mountinfo").read_text(
            encoding="utf-8", errors="surrogateescape"
        )
    except OSError:
        return
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        for mounted, inside in _mounts(mounts, version):
            folder = _below(root / mounted.lstrip("/"), inside, path)
            top = root / mounted.lstrip("/")
            while folder.is_relative_to(top):
                if folder.is_dir():
                    yield folder, version
                if folder == top:
                    break
                folder = folder.parent
            break


def _mounts(mountinfo: str, version: str) -> Iterator[tuple[str, str]]:
    """Where the file system of control groups is mounted, and which group its top shows: proc(5), mountinfo."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind or kind[0] != version:
            continue
        if version == _V1 and "memory" not in kind[-1].split(","):
            continue
        yield _plain_path(fields[4]), _plain_path(fields[3])


def _plain_path(text: str) -> str:
    """A path of mountinfo without its escapes: ``\\040`` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _below(top: Path, inside: str, path: str) -> Path:
    """The folder of a group. A container sees its own group at the top, whatever its path is called outside."""
    if inside not in ("/", ".") and (path == inside or path.startswith(f"{inside.rstrip('/')}/")):
        path = path[len(inside.rstrip("/")) :]
    parts = [part for part in path.split("/") if part and part != ".."]
    folder = top.joinpath(*parts)
    return folder if folder.is_dir() else top


def _memory(folder: Path, version: str) -> GroupMemory | None:
    """A group's memory; None where it has no limit or does not tell."""
    stat = _pairs(folder / "memory.stat")
    if version == _V1:
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _NO_LIMIT:
            return None
        cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        return GroupMemory(
            path=folder,
            limit=limit,
            used=max(0, used - cache),
            cache=cache,
            at_limit=_number(folder / "memory.failcnt") or 0,
            killed=_pairs(folder / "memory.oom_control").get("oom_kill"),
        )
    limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
    known = [one for one in limits if one is not None]
    used = _number(folder / "memory.current")
    if not known or used is None:
        return None
    events, cache = _pairs(folder / "memory.events"), stat.get("inactive_file", 0)
    return GroupMemory(
        path=folder,
        limit=min(known),
        used=max(0, used - cache),
        cache=cache,
        at_limit=events.get("max", 0),
        killed=events.get("oom_kill"),
        stalled=_stalled(folder / "memory.pressure"),
    )


def _number(file: Path) -> int | None:
    """The number in a file; None for ``max``, or where there is none."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _pairs(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}


def _stalled(file: Path) -> float | None:
    """``avg10`` of the line ``some``."""
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    return float(found.group(1)) if found else None
