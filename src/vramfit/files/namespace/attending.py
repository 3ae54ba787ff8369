"""What the parent does for a child in a namespace: keeps its overlays within the disk's cap, and settles them after.

A child may be killed at any moment; its mounts end with it, and the folders of its overlays lie open to the parent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Iterator

from vramfit.files.namespace import syscalls
from vramfit.files.namespace.contents import DROPPED, PLACE, Manifest, changes_in, is_whiteout, read_manifest
from vramfit.files.namespace.mounts import is_under
from vramfit.files.namespace.overlay_storage import remove
from vramfit.files.policy import FilePolicy, Writes

_LOOK_EVERY_S = 0.5
_LOOKS_AT_ALL = 8
"""Every so many looks all files are counted, whatever the disk says: others may free what the program takes."""
_LEFT = 0.75
"""Part of the cap that stays in use once contents are dropped."""
_SMALLEST = 1 << 20
_DATABASES = (".db", ".sqlite", ".sqlite3", "-wal", "-shm", "-journal")
"""Files that a program reads again piece by piece: a hole in one would end it."""
LISTING = "changes.txt"


@contextlib.contextmanager
def attended(policy: FilePolicy) -> Iterator[None]:
    """Attend a child that runs in the block; its folder is settled afterwards, whatever became of the child."""
    if policy.writes is Writes.REAL:
        yield
        return
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(policy, stop), name="vramfit-files", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        settle(policy)


def settle(policy: FilePolicy) -> None:
    """Move what a namespace wrote through into its place; leave the rest in a readable form, or remove it.

    Nothing happens where no namespace was entered.
    """
    manifest = read_manifest(policy.folder)
    if manifest is None:
        return
    for path in manifest.missing:
        if (kept := _kept(path, manifest)) is not None:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _strip(kept)
                _merge(kept, path)
            except OSError as error:  # the run's results must not be lost by it
                warnings.warn(f"what was written to {path} could not be put there: {error}", stacklevel=2)
    if policy.writes is Writes.KEEP:
        _make_readable(policy.folder, manifest)
    for name in os.listdir(policy.folder):
        if name.startswith(PLACE):
            with contextlib.suppress(OSError):  # the folder as a whole is removed by who made it
                remove(os.path.join(policy.folder, name))


def _watch(policy: FilePolicy, stop: threading.Event) -> None:
    free = None
    looks = 0
    while not stop.wait(_LOOK_EVERY_S):
        looks += 1
        manifest = read_manifest(policy.folder)
        if manifest is None:
            continue
        left = _free(policy.folder)
        free = left if free is None else max(left, free)
        # Looking at each file takes time: seldom, unless much was written.
        if free - left > policy.cap_bytes // 2 or looks % _LOOKS_AT_ALL == 0:
            keep_within(manifest, policy.cap_bytes)


def keep_within(manifest: Manifest, most_bytes: int) -> None:
    """Drop the contents of a namespace's largest files while all of them occupy too much; sizes stay."""
    files = sorted(_occupying(manifest), reverse=True)
    used = sum(size for size, _ in files)
    if used <= most_bytes:
        return
    dropped = []
    for size, path in files:
        if used <= most_bytes * _LEFT or size < _SMALLEST:
            break
        if path.endswith(_DATABASES):
            continue
        with contextlib.suppress(OSError), open(path, "r+b") as file:  # it is gone by now, or has no holes
            syscalls.drop_contents(file.fileno(), os.fstat(file.fileno()).st_size)
            dropped.append(path)
            used -= size
    with open(
        os.path.join(manifest.folder, DROPPED), "a", encoding="utf-8", errors="surrogateescape"
    ) as note:
        note.writelines(f"{path}\n" for path in dropped)


def _occupying(manifest: Manifest) -> Iterator[tuple[int, str]]:
    """Files of the overlays with the bytes that they occupy; not those that are written through."""
    for overlay in manifest.overlays:
        if overlay.in_memory:
            continue
        for folder, _, names in os.walk(overlay.upper):
            path = os.path.join(overlay.point, os.path.relpath(folder, overlay.upper))
            if any(is_under(os.path.normpath(path), through) for through in manifest.missing):
                continue
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.lstat(os.path.join(folder, name))
                    if stat.S_ISREG(facts.st_mode):
                        yield facts.st_blocks * 512, os.path.join(folder, name)


def _free(folder: str) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _kept(path: str, manifest: Manifest) -> str | None:
    """Where a namespace kept what was written to a path, None if nothing was."""
    over = [overlay for overlay in manifest.overlays if is_under(path, overlay.point)]
    if not over:
        return None
    overlay = max(over, key=lambda each: len(each.point))
    kept = os.path.join(overlay.upper, os.path.relpath(path, overlay.point))
    try:
        return None if is_whiteout(os.lstat(kept)) else kept
    except OSError:
        return None


def _strip(kept: str) -> None:
    """Take overlayfs' marks and whiteouts away."""
    if not os.path.isdir(kept) or os.path.islink(kept):
        _unmark(kept)
        return
    for folder, _, names in os.walk(kept):
        _unmark(folder)
        for name in names:
            path = os.path.join(folder, name)
            if is_whiteout(os.lstat(path)):
                os.unlink(path)
            else:
                _unmark(path)


def _unmark(path: str) -> None:
    with contextlib.suppress(OSError):  # a file system without such marks
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith(("user.overlay.", "trusted.overlay.")):
                os.removexattr(path, name, follow_symlinks=False)


def _merge(source: str, target: str) -> None:
    """Move a file or folder over another; what lies only in the other stays."""
    if os.path.isdir(source) and not os.path.islink(source) and os.path.isdir(target):
        for name in os.listdir(source):
            _merge(os.path.join(source, name), os.path.join(target, name))
        return
    try:
        os.replace(source, target)
    except OSError:
        shutil.move(source, target)


def _make_readable(place: str, manifest: Manifest) -> None:
    """Leave each file under its absolute path, and a list of all changes."""
    changes = [
        f"{change.kind.value}\t{change.size_bytes}\t{change.path}\n" for change in changes_in(manifest)
    ]
    for overlay in manifest.overlays:
        if not os.path.isdir(overlay.upper):
            continue
        _strip(overlay.upper)
        target = place + overlay.point
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(overlay.upper):
            _merge(os.path.join(overlay.upper, name), os.path.join(target, name))
    listing = os.path.join(place, LISTING)
    with open(listing, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(changes)
