"""Renames and hard links that overlays refuse and one file system would not: Python's calls do them by copying.

Two cases give EXDEV in an overlay where the real folder gives none: a folder that existed before the run, in a user
namespace (its overlays have no redirects), and a move between two overlays that lie on one file system. The copy is
made beside the target and renamed onto it, so that a reader of the target finds the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

from vramfit.files import real
from vramfit.files.namespace.mounts import Mount, mount_of
from vramfit.patching import PatchStack

# -- Copies a file's data: by sharing extents where the file system can, and without its holes ---------------


def copy_contents(source: str, target: str) -> None:
    """Copy a file's data, leaving out its holes."""
    with open(source, "rb") as reading, open(target, "wb") as writing:
        _copy_data(reading.fileno(), writing.fileno())


def _copy_data(reading: int, writing: int) -> None:
    size = os.fstat(reading).st_size
    for start, end in real.data_ranges(reading, size):
        _copy_range(reading, writing, start, end)
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
    if hasattr(shutil, "_USE_CP_COPY_FILE_RANGE"):  # from Python 3.14 on it comes first, and fills holes
        patches.set(shutil, "_USE_CP_COPY_FILE_RANGE", False)


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
    with contextlib.suppress(OSError):  # of an owner unknown to the namespace
        os.chown(target, facts.st_uid, facts.st_gid)


Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def install(mounts: list[Mount], patches: PatchStack) -> None:
    """Replace ``os.rename``, ``os.replace`` and ``os.link``, which pathlib and shutil call.

    Moves between the `mounts` seen before the namespace fail as they would have.
    """
    rename, link = os.rename, os.link

    def emulated(original: Callable[..., None]) -> Callable[..., None]:
        def move(
            src: Path, dst: Path, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            try:
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            except OSError as error:
                source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
                if error.errno == errno.EBUSY and _is_bound_file(source, target):
                    copy_contents(source, target)
                    os.unlink(source)
                elif error.errno == errno.EXDEV and _on_one(source, target, mounts):
                    _move(source, target, rename)
                else:
                    raise

        move.__name__ = move.__qualname__ = original.__name__
        move.__doc__ = original.__doc__
        return move

    def linked(
        src: Path,
        dst: Path,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        try:
            link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        except OSError as error:
            source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
            if error.errno != errno.EXDEV or not _on_one(source, target, mounts):
                raise
            _beside(source, target, link)

    linked.__name__ = linked.__qualname__ = "link"
    linked.__doc__ = link.__doc__
    patches.set(os, "rename", emulated(rename))
    patches.set(os, "replace", emulated(os.replace))
    patches.set(os, "link", linked)


def _absolute(path: Path, folder: int | None) -> str:
    """A path without symbolic links, except the last part, which a rename does not follow."""
    named = os.fsdecode(path)
    if folder is not None and not os.path.isabs(named):
        named = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), named)
    above, name = os.path.split(os.path.abspath(named))
    return os.path.join(os.path.realpath(above), name)


def _on_one(source: str, target: str, mounts: list[Mount]) -> bool:
    """Whether a rename between the real folders of two paths stays within one mount."""
    return mount_of(os.path.dirname(source), mounts) == mount_of(os.path.dirname(target), mounts)


def _is_bound_file(source: str, target: str) -> bool:
    """Whether a file moves onto one that is written for real: a mount, which no other file can replace."""
    try:
        return stat.S_ISREG(os.lstat(source).st_mode) and stat.S_ISREG(os.lstat(target).st_mode)
    except OSError:
        return False


def _move(source: str, target: str, rename: Callable[..., None]) -> None:
    facts = os.lstat(source)
    is_folder = stat.S_ISDIR(facts.st_mode)
    _refuse(target, is_folder)
    if is_folder and (target + os.sep).startswith(source + os.sep):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, target)
    _beside(source, target, rename)
    if is_folder:
        shutil.rmtree(source)
    else:
        os.unlink(source)


def _refuse(target: str, is_folder: bool) -> None:
    """Refuse what rename(2) refuses."""
    try:
        facts = os.lstat(target)
    except FileNotFoundError:
        return
    if is_folder and not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
    if not is_folder and stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if is_folder and os.listdir(target):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)


def _beside(source: str, target: str, place: Callable[..., None]) -> None:
    """Copy something beside a target, then put it there."""
    copy = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(4)}")
    try:
        if os.path.isdir(source) and not os.path.islink(source):
            shutil.copytree(source, copy, symlinks=True, copy_function=_copy)
        else:
            _copy(source, copy)
        place(copy, target)
    except BaseException:
        _discard(copy)
        raise
    _discard(copy)


def _discard(copy: str) -> None:
    """Remove a copy that was not renamed away."""
    if os.path.isdir(copy) and not os.path.islink(copy):
        shutil.rmtree(copy)
    elif os.path.lexists(copy):
        os.unlink(copy)


def _copy(source: str, target: str) -> Any:
    """As ``shutil.copy2``, with the holes of sparse files; links and pipes are made anew."""
    facts = os.lstat(source)
    if stat.S_ISREG(facts.st_mode):
        copy_contents(source, target)
    elif stat.S_ISLNK(facts.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISFIFO(facts.st_mode):
        os.mkfifo(target)
    else:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
    shutil.copystat(source, target, follow_symlinks=False)
    return target
