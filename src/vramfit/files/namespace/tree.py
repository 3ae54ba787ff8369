"""Composes the tree that a program sees: the real one, read-only, with an overlay over each island, and enters it.

NOTE [Tree]

The new root begins as a copy of all mounts (a recursive bind), in which each file system that could be written to is
made read-only. Overlays are mounted over the islands, and what was mounted below an island is mounted there again.
Paths that are written through are bound from the real tree last, so that they lie above overlays.

In a user namespace the kernel refuses a lower folder that has mounts of the outer namespace below it, since those
could hide something (fs/namespace.c: clone_private_mount, has_locked_children). Such an island is taken apart: those of
its folders that hold no mount get overlays of their own, and the island itself gets one over a skeleton, a folder with
the same entries. Files directly in it are copied there; on file systems that share extents this takes no time. A file
that the user may neither write nor replace is bound instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from vramfit.files.namespace import syscalls
from vramfit.files.namespace.islands import Island
from vramfit.files.namespace.mounts import SHARED_MEMORY, Mount, below, flags_of, is_under
from vramfit.files.namespace.overlay_storage import Medium, Storage, in_memory
from vramfit.files.namespace.renames import copy_contents

MOST_COPIED = 256 << 20
"""Bytes of files that are copied where an island has mounts below it."""

_FLAGS = {"nosuid": syscalls.NO_SETUID, "nodev": syscalls.NO_DEVICES, "noexec": syscalls.NO_EXEC}
_INVALID = 22
_SOCKETS = "/proc/net/unix"
_SOCKET = re.compile(r"(?:\S+ +){6}\d+ (/.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MountedOverlay:
    """One overlay.

    Attributes:
        point: the folder that it lies over.
        upper: the folder that holds what is written there.
        in_memory: whether that folder is on a file system of the namespace's own.
        device: the real file system that the folder lies on.
    """

    point: str
    upper: str
    in_memory: bool
    device: str


class UncoverableError(OSError):
    """A folder that a program could write to can get no overlay."""


@dataclass(kw_only=True)
class Tree:
    """The tree of one run.

    Attributes:
        storage: where overlays keep what is written.
        mounts: those that were seen before.
        real: the path of the real tree where nothing can be written.
        beside: islands among the folders that lie beside mounts.
        through: existing paths that are written for real.
        hidden: folders of our own, which are empty for the program.
        overlays: those that were mounted.
    """

    storage: Storage
    mounts: list[Mount]
    real: str
    beside: frozenset[str]
    through: Iterable[str]
    hidden: Iterable[str]
    overlays: list[MountedOverlay] = field(default_factory=list)
    copied_bytes: int = 0
    tried: int = 0

    @property
    def root(self) -> str:
        """Where the new tree is built."""
        return os.path.join(self.storage.folder, "root")

    def compose(self, islands: Iterable[Island]) -> None:
        """Build the tree. Called inside the namespace.

        Raises:
            UncoverableError: a folder can get no overlay; the message names it.
            OSError: a mount is refused.
        """
        os.makedirs(self.root)
        syscalls.mount("/", self.root, flags=syscalls.BIND | syscalls.RECURSIVE)
        for mount in self.mounts:
            self._protect(mount)
        for island in islands:
            self._cover(island.point, island.mount)
        for path in self.through:
            if os.path.exists(path):
                self._bind(path)
        self._bind_sockets()
        for folder in self.hidden:
            with contextlib.suppress(FileNotFoundError):
                in_memory(self._inside(folder))
                syscalls.make_read_only(self._inside(folder))

    def enter(self) -> None:
        """Make the tree this process's root; the current folder becomes the one of the same path in it.

        Raises:
            OSError: the system refuses.
        """
        try:
            here = os.getcwd()
        except FileNotFoundError:
            here = None
        os.chdir(self.root)
        syscalls.pivot_root(".", ".")  # the old root lies on the new one then, and goes at once
        syscalls.unmount(".")
        os.chdir("/")
        if here is not None:
            with contextlib.suppress(OSError):
                os.chdir(here)

    def _inside(self, path: str) -> str:
        """Where a path is while the tree is built."""
        return self.root + path if path != "/" else self.root

    def _protect(self, mount: Mount) -> None:
        if mount.is_writable:
            syscalls.make_read_only(self._inside(mount.point))

    def _bind(self, path: str) -> None:
        inner = syscalls.RECURSIVE if below(path, self.mounts) else 0
        syscalls.mount(path, self._inside(path), flags=syscalls.BIND | inner)

    # -- overlays ------------------------------------------------------------------------------------------------

    def _cover(self, point: str, mount: Mount) -> None:
        """Put an overlay over a folder, and what is mounted below it back."""
        inner = below(point, self.mounts)
        try:
            self._overlay(point, point, mount)
        except OSError as error:
            if error.errno != _INVALID or not inner:
                raise UncoverableError(
                    error.errno, f"overlayfs refuses {point} ({mount.kind}): {error.strerror}", point
                ) from error
            self._take_apart(point, mount)
            return
        for other in inner:
            self._attach(other)

    def _attach(self, mount: Mount) -> None:
        """Mount what an overlay hides again, with all that is mounted below it."""
        self._bind(mount.point)
        for other in self.mounts:
            if is_under(other.point, mount.point):
                self._protect(other)

    def _overlay(self, point: str, lower: str, mount: Mount) -> None:
        storage, number = self.storage, str(self.tried)
        self.tried += 1  # what was tried in vain cannot be used again: it is marked as volatile
        if mount.point == SHARED_MEMORY:  # what lies in memory stays in memory
            storage = Storage(
                folder=self.storage.path("shared"), medium=Medium.MEMORY, marks=self.storage.marks
            )
            if not os.path.ismount(storage.folder):
                in_memory(storage.folder)
        flags = sum(_FLAGS[flag] for flag in flags_of(mount))
        upper = storage.overlay(number, lower, self._inside(point), flags)
        self.overlays.append(
            MountedOverlay(
                point=point,
                upper=upper,
                in_memory=storage.medium is Medium.MEMORY,
                device=mount.device,
            )
        )

    # -- an island with mounts below it, in a user namespace --------------------------------------------------------

    def _take_apart(self, point: str, mount: Mount) -> None:
        lower = self.storage.path("skeleton", str(self.tried))
        folders, bound = [], []
        with os.scandir(self.real + point) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path, copy = os.path.join(point, entry.name), os.path.join(lower, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(copy)
                    folders.append(path)
                elif entry.is_symlink():
                    os.symlink(os.readlink(entry.path), copy)
                elif entry.is_file() and _may_be_changed(path) and os.access(path, os.R_OK):
                    self._copy(path, copy)
                else:
                    with open(copy, "w", encoding="utf-8"):
                        bound.append(path)
        shutil.copystat(point, lower)
        self._overlay(point, lower, mount)
        for path in bound:
            self._bind(path)
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                syscalls.make_read_only(self._inside(path))
        points = {other.point: other for other in self.mounts}
        for folder in folders:
            if folder in points:
                self._attach(points[folder])
            elif folder in self.beside:
                self._cover(folder, mount)
            else:
                self._bind(folder)
                syscalls.make_read_only(self._inside(folder))
                for other in self.mounts:
                    if is_under(other.point, folder):
                        self._protect(other)

    def _copy(self, path: str, copy: str) -> None:
        self.copied_bytes += os.stat(path).st_blocks * 512
        if self.copied_bytes > MOST_COPIED:
            folder = os.path.dirname(path)
            raise UncoverableError(
                _INVALID,
                f"{folder} has file systems mounted below it and large files in it, which would have to be copied",
                folder,
            )
        copy_contents(self.real + path, copy)  # read there, its time of access stays
        shutil.copystat(path, copy)

    # -- sockets -------------------------------------------------------------------------------------------------

    def _bind_sockets(self) -> None:
        """Bind sockets that others listen on: overlayfs shows another inode, on which nobody listens."""
        for path in listening():
            if not any(is_under(path, overlay.point) for overlay in self.overlays):
                continue
            if any(is_under(path, folder) for folder in self.through):
                continue
            with contextlib.suppress(OSError):  # it is gone by now, or in a folder that we may not search
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    self._bind(os.path.realpath(path))


def _may_be_changed(path: str) -> bool:
    """Whether a program could write to a file, or put another in its place."""
    folder = os.path.dirname(path)
    if os.access(path, os.W_OK):
        return True
    if not os.access(folder, os.W_OK):
        return False
    is_sticky = os.stat(folder).st_mode & stat.S_ISVTX
    return not is_sticky or os.geteuid() in (0, os.lstat(path).st_uid)


def listening() -> list[str]:
    """Paths of the sockets of this machine, by /proc/net/unix."""
    try:
        with open(_SOCKETS, encoding="utf-8", errors="surrogateescape") as file:
            found = [_SOCKET.fullmatch(line.rstrip("\n")) for line in file]
    except OSError:
        return []
    return sorted({match[1] for match in found if match is not None})
