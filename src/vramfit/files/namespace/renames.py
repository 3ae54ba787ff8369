"""Renames and hard links that overlays refuse and one file system would not: Python's calls do them by copying.

Two cases give EXDEV in an overlay where the real folder gives none: a folder that existed before the run, in a user
namespace (its overlays have no redirects), and a move between two overlays that lie on one file system. The copy is
made beside the target and renamed onto it, so that a reader of the target finds the old file or the new one.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from typing import Any

from vramfit.files.namespace.file_copying import copy_contents
from vramfit.files.namespace.mounts import Mount, mount_of
from vramfit.patching import PatchStack

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def install(mounts: list[Mount], patches: PatchStack) -> None:
    """Replace ``os.rename``, ``os.replace`` and ``os.link``; what pathlib and shutil call is that.

    Args:
        mounts: those that were seen before the namespace: moves between them fail as they would.
        patches: undoes it.
    """
    rename, link, rename_as_is = os.rename, os.link, os.rename

    def emulated(original: Callable[..., None]) -> Callable[..., None]:
        def move(
            src: Path, dst: Path, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            try:
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            except OSError as error:
                source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
                if error.errno == errno.EBUSY and _is_bound_file(source, target):
                    _pour(source, target)
                elif error.errno == errno.EXDEV and _on_one(source, target, mounts):
                    _move(source, target, rename_as_is)
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
    """Whether a rename between the real folders of two paths is one within a mount."""
    return mount_of(os.path.dirname(source), mounts) == mount_of(os.path.dirname(target), mounts)


def _is_bound_file(source: str, target: str) -> bool:
    """Whether a file moves onto one that is written for real: a mount, which cannot be replaced by another file."""
    try:
        return stat.S_ISREG(os.lstat(source).st_mode) and stat.S_ISREG(os.lstat(target).st_mode)
    except OSError:
        return False


def _pour(source: str, target: str) -> None:
    """Give a file another's contents."""
    copy_contents(source, target)
    os.unlink(source)


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
    """What rename(2) refuses."""
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
