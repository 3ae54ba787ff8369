"""Islands: the folders that a user could write to, each of which gets an overlay; all else is made read-only.

For root a whole file system is one island. For anybody else it is not: an overlay over a folder of root's would fail
wherever something must be copied up below it (see NOTE [Ways]), so islands begin where a folder is the user's own, or
may be written by all. They are looked for on the way to every folder that a program is known to use, and below each
mount as far as `_DEPTH` and `_MOST_FOLDERS` go. A folder that is missed cannot be written to: it is read-only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vramfit.files.namespace.mounts import Mount, is_under, mount_of

Knows = Callable[[int, int], bool]
"""Whether files of a user and a group can be copied up."""

_DEPTH = 3
_MOST_FOLDERS = 400
_MOST_LOOKED_AT = 2000
_SYSTEM = {
    *("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/sbin", "/snap", "/sys", "/usr"),
}
"""Folders of the distribution: nothing below them is a user's, unless a program is known to use it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Island:
    """A folder that gets an overlay."""

    point: str
    mount: Mount


def find_islands(mounts: list[Mount], knows: Knows, known: Iterable[str], skip: str) -> list[Island]:
    """The folders that could be written to, those above others first.

    Args:
        mounts: those that are seen.
        knows: whose files can be copied up.
        known: paths that a program may write to.
        skip: a folder of our own.
    """
    found: dict[str, Island] = {}
    paths = [os.path.realpath(path) for path in known]
    for mount in mounts:
        if not mount.is_writable or is_under(mount.point, skip) or not os.path.isdir(mount.point):
            continue
        here = [path for path in paths if mount_of(path, mounts) == mount]
        for point in _points(mount, mounts, knows, here, skip):
            found[point] = Island(point=point, mount=mount)
    return [found[point] for point in sorted(found)]


def islands_beside_mounts(mounts: list[Mount], knows: Knows) -> frozenset[str]:
    """Islands among the folders that lie beside a mount, in case an island must be taken apart: see NOTE [Tree].

    They are looked for before a namespace is entered: inside, all owners that it does not know look alike.
    """
    above: set[str] = set()
    for mount in mounts:
        folder = mount.point
        while folder != "/":
            folder = os.path.dirname(folder)
            above.add(folder)
    writable = [mount for mount in mounts if mount.is_writable]
    return frozenset(
        child
        for folder in above
        if mount_of(folder, mounts) in writable
        for child in _folders(folder)
        if is_island(child, knows)
    )


def known_paths(environ: dict[str, str]) -> list[str]:
    """Folders that a program is known to use: where it runs, the user's own, temporary ones, libraries."""
    home = environ.get("HOME") or os.path.expanduser("~")
    named = (environ.get(name) for name in ("TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "SCRATCH", "WORK"))
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    here = []
    with contextlib.suppress(FileNotFoundError):  # it was removed under us
        here.append(os.getcwd())
    libraries = [path for path in sys.path if os.path.isabs(path)]
    return [
        *(path for path in (*named, home, runtime, sys.prefix, *here, *libraries) if path),
        *("/tmp", "/var/tmp", "/var/lock", "/run/lock"),
    ]


def uncoverable(folder: str, knows: Knows) -> str | None:
    """Why files in a folder that a program works in could not be replaced in an overlay, None if they can."""
    try:
        facts = os.stat(folder)
        if not os.access(folder, os.W_OK):
            return None  # nothing can be written there
        if not knows(facts.st_uid, facts.st_gid) and not facts.st_mode & stat.S_ISVTX:
            return _strange(folder, facts)
        with os.scandir(folder) as entries:
            for entry in itertools.islice(entries, _MOST_LOOKED_AT):
                inside = entry.stat(follow_symlinks=False)
                if inside.st_uid == os.geteuid() and not knows(inside.st_uid, inside.st_gid):
                    return _strange(entry.path, inside)
    except OSError:
        return None  # it is not there
    return None


def _strange(path: str, facts: os.stat_result) -> str:
    return (
        f"{path} belongs to user {facts.st_uid} and group {facts.st_gid}, and a user namespace of "
        f"user {os.getuid()} knows group {os.getgid()} alone"
    )


def _points(mount: Mount, mounts: list[Mount], knows: Knows, known: list[str], skip: str) -> list[str]:
    if knows_all(mount.point, knows):
        return [mount.point]
    others = {other.point for other in mounts if other is not mount}
    found = set(_below(mount.point, knows, others | {skip}))
    if is_island(mount.point, knows):
        found = {mount.point}
    for path in known:
        found.update(_on_way(path, mount.point, knows))
    return sorted(found)


def knows_all(folder: str, knows: Knows) -> bool:
    """Whether a folder's owner is one whose files can be copied up, and this process may write there."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return knows(facts.st_uid, facts.st_gid) and is_island(folder, knows)


def is_island(folder: str, knows: Knows) -> bool:
    """Whether everything that a user could do in a folder can be done in an overlay over it."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False  # it cannot be seen, so nothing in it can be written
    if not stat.S_ISDIR(facts.st_mode):
        return False
    if knows(facts.st_uid, facts.st_gid):
        return facts.st_uid == os.geteuid() or os.geteuid() == 0 or os.access(folder, os.W_OK)
    return os.access(folder, os.W_OK | os.X_OK)


def _on_way(path: str, top: str, knows: Knows) -> Iterator[str]:
    """Islands from a mount down to a path: one more wherever a stranger's folder lies between.

    What lies directly in an island's folder can be copied up, whoever owns that folder.
    """
    point, covered = top, is_island(top, knows)
    if covered:
        yield top
    for part in os.path.relpath(path, top).split(os.sep):
        point = os.path.normpath(os.path.join(point, part))
        try:
            facts = os.lstat(point)
        except OSError:
            return
        if knows(facts.st_uid, facts.st_gid) and covered:
            continue
        covered = is_island(point, knows)
        if covered and stat.S_ISDIR(facts.st_mode):
            yield point


def _below(top: str, knows: Knows, leave: set[str]) -> Iterator[str]:
    """Islands below a folder that is not one, breadth first."""
    waiting, looked = [(top, 0)], 0
    while waiting and looked < _MOST_FOLDERS:
        folder, depth = waiting.pop(0)
        looked += 1
        for child in _folders(folder):
            if child in leave or child in _SYSTEM:
                continue
            if is_island(child, knows):
                yield child
            elif depth + 1 < _DEPTH:
                waiting.append((child, depth + 1))


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []  # it cannot be listed
