"""Copies a file's data: by sharing extents where the file system can, and without its holes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import BinaryIO

from vramfit.patching import PatchStack


def copy_contents(source: str, target: str) -> None:
    """Copy a file's data, leaving out its holes."""
    with open(source, "rb") as reading, open(target, "wb") as writing:
        _copy_data(reading.fileno(), writing.fileno())


def _copy_data(reading: int, writing: int) -> None:
    here, size = 0, os.fstat(reading).st_size
    while here < size:
        try:
            start = os.lseek(reading, here, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        here = os.lseek(reading, start, os.SEEK_HOLE)
        _copy_range(reading, writing, start, here)
    os.ftruncate(writing, size)


def _copy_range(reading: int, writing: int, start: int, end: int) -> None:
    while start < end:
        try:
            done = os.copy_file_range(reading, writing, end - start, start, start)
        except OSError:  # these two file systems cannot share or copy it themselves
            done = os.pwrite(writing, os.pread(reading, min(end - start, 1 << 20), start), start)
        if done == 0:
            return  # it became shorter meanwhile
        start += done


def keep_holes(patches: PatchStack) -> None:
    """Let ``shutil.copyfile`` leave out the holes of a sparse file, such as a virtual checkpoint, as cp(1) does."""
    plain = getattr(shutil, "_fastcopy_sendfile", None)
    if plain is None:
        return  # a Python that copies otherwise

    def copy(source: BinaryIO, target: BinaryIO) -> None:
        facts = os.fstat(source.fileno())
        if facts.st_blocks * 512 >= facts.st_size:
            plain(source, target)
        else:
            _copy_data(source.fileno(), target.fileno())

    patches.set(shutil, "_fastcopy_sendfile", copy)


def copy_upper(source: str, target: str) -> None:
    """Copy what an overlay keeps, with its marks; sockets are left out."""
    facts = os.lstat(source)
    if stat.S_ISDIR(facts.st_mode):
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            copy_upper(os.path.join(source, name), os.path.join(target, name))
    elif stat.S_ISREG(facts.st_mode):
        copy_contents(source, target)
    elif stat.S_ISLNK(facts.st_mode):
        os.symlink(os.readlink(source), target)
        return
    elif stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0:
        os.mknod(target, stat.S_IFCHR, 0)  # a whiteout, which anybody may make
        return
    else:
        return
    shutil.copystat(source, target)  # extended attributes too
    with contextlib.suppress(OSError):  # of another owner, whom the namespace does not know
        os.chown(target, facts.st_uid, facts.st_gid)
