"""What would have happened to real files: found in an overlay, and summed up for the report. No torch."""

from __future__ import annotations

import contextlib
import os
import stat as modes
from collections.abc import Iterable, Iterator

from vramfit.files import real
from vramfit.files.overlay import Folder, Overlay, View, join
from vramfit.files.policy import Backend, FilePolicy, Writes
from vramfit.trace.outcome import ChangeKind, FileChange, FileChanges

MOST_ENTRIES = 10_000
"""Entries that a report lists."""
_MOST_COUNTED = 10_000
"""Files of a deleted folder whose sizes are summed."""


def summarise(
    policy: FilePolicy,
    backend: Backend,
    entries: Iterable[FileChange],
    *,
    reason: str = "",
    notes: Iterable[str] = (),
) -> FileChanges:
    """The facts of a protected run.

    Args:
        entries: what would have happened, in any order; Python's caches of compiled modules are left out.
        reason: why the better backend was not used.
        notes: limits that were met.
    """
    told = sorted(
        (entry for entry in entries if "__pycache__" not in entry.path), key=lambda entry: entry.path
    )
    return FileChanges(
        backend=backend.value,
        writes=policy.writes.value,
        entries=tuple(told[:MOST_ENTRIES]),
        reason=reason,
        kept_at=policy.folder if policy.writes is Writes.KEEP else None,
        notes=tuple(dict.fromkeys(notes)),
        omitted=max(0, len(told) - MOST_ENTRIES),
    )


def look_through(overlay: Overlay) -> Iterator[FileChange]:
    """Every path that would have changed, in no order."""
    overlay.catch_up()
    for path, folder in list(overlay.folders.items()):
        yield from _of_folder(overlay, path, folder)


def _of_folder(overlay: Overlay, path: str, folder: Folder) -> Iterator[FileChange]:
    was_folder = real.is_folder(path)
    if not was_folder:
        kind = ChangeKind.REPLACED if real.exists(path) else ChangeKind.FOLDER
        yield FileChange(path=path, kind=kind)
    elif path != "/" and folder.below == path and _metadata_differs(overlay.upper + path, path):
        yield FileChange(path=path, kind=ChangeKind.METADATA)
    names = set(overlay.names(View(path, folder.below, folder, False)))
    for name in names:
        where = join(path, name)
        if name in folder.moved:
            yield _of_file(folder.moved[name], where)
        elif real.exists(overlay.upper + where) and not real.is_folder(overlay.upper + where):
            yield _of_file(overlay.upper + where, where)
    if was_folder:
        with contextlib.suppress(OSError):
            for name in real.listdir(path):
                if name not in names:
                    where = join(path, name)
                    if not overlay.is_through(where):
                        yield FileChange(path=where, kind=ChangeKind.DELETED, size_bytes=_size(where))


def _of_file(now: str, path: str) -> FileChange:
    found = real.lstat(now)
    size = found.st_size if modes.S_ISREG(found.st_mode) else 0
    if not real.exists(path):
        return FileChange(path=path, kind=ChangeKind.WRITTEN, size_bytes=size)
    before = real.lstat(path)
    same = modes.S_ISREG(found.st_mode) and modes.S_ISREG(before.st_mode) and _same_bytes(now, path)
    return FileChange(path=path, kind=ChangeKind.METADATA if same else ChangeKind.REPLACED, size_bytes=size)


def _same_bytes(one: str, other: str) -> bool:
    """Whether two files hold the same; large ones count as different unless only their modes can differ."""
    first, second = real.lstat(one), real.lstat(other)
    if first.st_size != second.st_size:
        return False
    if first.st_mtime_ns == second.st_mtime_ns:
        return True
    if first.st_size > 1 << 24:
        return False
    with (
        contextlib.suppress(OSError),
        real.open_file(one, "rb") as left,
        real.open_file(other, "rb") as right,
    ):
        return bool(left.read() == right.read())
    return False


def _metadata_differs(now: str, before: str) -> bool:
    """Whether a folder's mode was changed; its times follow from what was done in it."""
    now_mode, mode = real.lstat(now).st_mode, real.lstat(before).st_mode
    return modes.S_IMODE(now_mode) != modes.S_IMODE(mode) | 0o700


def _size(path: str) -> int:
    """Bytes of a file, or of the files below a folder as far as they are counted."""
    total, counted, waiting = 0, 0, [path]
    while waiting and counted < _MOST_COUNTED:
        one = waiting.pop()
        with contextlib.suppress(OSError):
            found = real.lstat(one)
            counted += 1
            if modes.S_ISDIR(found.st_mode):
                waiting += [os.path.join(one, name) for name in real.listdir(one)]
            elif modes.S_ISREG(found.st_mode):
                total += found.st_size
    return total
