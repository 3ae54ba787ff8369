"""Folders that belong to a process, and are removed by the next one where that was killed.

The name has the process's number, the moment it started, and where its number counts: a number alone is given again,
and in another container, or on another machine that has the same disk, it means another process, whose folders are
left alone. So is what a machine left that was started anew since.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import uuid
import weakref
from pathlib import Path

from vramfit.writing import StrPath, refused

_PREFIX = "vramfit-tiers"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]{{8}}\Z")


def started_at(process: int) -> int | None:
    """When a process started, in ticks after the machine did (field 22 of /proc/PID/stat); None where it is dead."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in "ZX" else int(fields[18])


def _namespace() -> int:
    """Which numbers of processes these are: of which start of which machine, and in which namespace of it.

    The first namespace of every machine has the same number (include/linux/proc_ns.h: PROC_PID_INIT_INO).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return uuid.UUID(boot).int ^ Path("/proc/self/ns/pid").stat().st_ino
    except (OSError, ValueError):
        return 0


class OwnedFolder:
    """A new folder of this process. It goes when it is closed, at exit, or when another process looks in its place.

    Args:
        root: where: ``/dev/shm``, or a folder on a disk.

    Raises:
        WriteError: it cannot be made there.
    """

    def __init__(self, root: StrPath) -> None:
        self.root = Path(root).absolute()
        sweep(self.root)
        owner = os.getpid()
        name = f"{_PREFIX}-{owner}-{started_at(owner) or 0}-{_namespace()}-{secrets.token_hex(4)}"
        self.path = self.root / name
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise refused(self.path, error) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, owner)

    def close(self) -> None:
        """Remove it with what it holds."""
        self._finalizer()


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves what is its parent's
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: StrPath) -> list[Path]:
    """Remove the folders of dead processes; gives their paths. Those of other namespaces, machines and users stay."""
    found: list[Path] = []
    here = _namespace()
    if not here:  # nothing says who is alive
        return found
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            named = _NAME.match(entry.name)
            if named is None or int(named[3]) != here or not entry.is_dir(follow_symlinks=False):
                continue
            process, start = int(named[1]), int(named[2])
            if started_at(process) != start:
                shutil.rmtree(entry.path, ignore_errors=True)
                found.append(Path(entry.path))
    return found
