"""Where overlays keep what is written: on the disk of the run's own folder, or in memory where that cannot hold any."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from enum import Enum

from vramfit.files.namespace import syscalls
from vramfit.files.namespace.ways import Marks


class Medium(Enum):
    """What holds the written files."""

    FOLDER = "folder"
    """The run's own folder."""
    MEMORY = "memory"
    """A file system in memory, of the namespace alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Folders for overlays.

    Attributes:
        medium: what that folder is on.
        marks: how overlayfs marks folders there.
    """

    folder: str
    medium: Medium
    marks: Marks

    def prepare(self, most_bytes: int) -> None:
        """Mount what is in memory. Called inside the namespace.

        Raises:
            OSError: the system refuses.
        """
        os.makedirs(self.folder, exist_ok=True)
        if self.medium is Medium.MEMORY:
            in_memory(self.folder, most_bytes)
        os.chmod(self.folder, 0o700)

    def path(self, *parts: str) -> str:
        """A folder in it, made where it is missing."""
        folder = os.path.join(self.folder, *parts)
        os.makedirs(folder, exist_ok=True)
        return folder

    def overlay(self, number: str, lower: str, target: str, flags: int = 0) -> str:
        """Mount an overlay over a folder; returns where it keeps what is written.

        Raises:
            OSError: overlayfs refuses one of the folders.
        """
        upper, work = self.path("upper", number), self.path("work", number)
        _become(upper, lower)
        with contextlib.ExitStack() as stack:
            named = ",".join(
                f"{what}={_plain(folder, stack)}"
                for what, folder in (("lowerdir", lower), ("upperdir", upper), ("workdir", work))
            )
            # volatile: nothing of it outlives the machine, so nothing is flushed to the disk.
            syscalls.mount("overlay", target, "overlay", flags, f"{named},{self.marks.options},volatile")
        return upper

    def check(self) -> None:
        """See whether overlays work here: a folder that is removed and made again must be empty.

        Raises:
            OSError: overlays do not work here.
        """
        lower, merged = self.path("check", "lower"), self.path("check", "merged")
        os.makedirs(os.path.join(lower, "folder"))
        for name in ("kept", os.path.join("folder", "gone")):
            with open(os.path.join(lower, name), "w", encoding="utf-8") as file:
                file.write(name)
        self.overlay("check", lower, merged)
        again = os.path.join(merged, "folder")
        shutil.rmtree(again)
        os.mkdir(again)
        with open(os.path.join(merged, "kept"), "w", encoding="utf-8") as file:
            file.write("changed")
        with open(os.path.join(lower, "kept"), encoding="utf-8") as file:
            below = file.read()
        if os.listdir(again) or below != "kept" or not os.path.exists(os.path.join(lower, "folder", "gone")):
            raise OSError(95, "what is removed there is not kept apart", self.folder)
        syscalls.unmount(merged)


def in_memory(folder: str, most_bytes: int | None = None) -> None:
    """Mount an empty file system in memory.

    Raises:
        OSError: the system refuses.
    """
    size = "" if most_bytes is None else f",size={most_bytes}"
    syscalls.mount("tmpfs", folder, "tmpfs", syscalls.NO_SETUID | syscalls.NO_DEVICES, f"mode=0700{size}")


def remove(folder: str) -> None:
    """Remove a folder and all in it, of whatever mode: overlayfs leaves folders that nobody may enter.

    Raises:
        OSError: something of it stays.
    """
    with contextlib.suppress(FileNotFoundError):
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            inside = list(entries)
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)


def _become(upper: str, lower: str) -> None:
    """Give an overlay's upper folder, whose mode, owner and times the overlay shows, those of the lower one."""
    facts = os.stat(lower)
    with contextlib.suppress(OSError):  # an owner unknown to the namespace
        os.chown(upper, facts.st_uid, facts.st_gid)
    os.chmod(upper, facts.st_mode & 0o7777)
    os.utime(upper, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _plain(folder: str, stack: contextlib.ExitStack) -> str:
    """A path that needs no escapes among mount options."""
    if not set(folder) & set(',:\\"'):
        return folder
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    stack.callback(os.close, number)
    return f"/proc/self/fd/{number}"
