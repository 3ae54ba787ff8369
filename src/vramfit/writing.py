"""Writes results so that a reader finds the whole file or none: write beside, flush to disk, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from vramfit.errors import WriteError

StrPath: TypeAlias = str | os.PathLike[str]
"""A path as the standard library's functions take it."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_HINTS = {
    errno.ENOSPC: "Free some space or choose a path on another disk",
    errno.EDQUOT: "Free some of your quota or choose a path on another disk",
    errno.EFBIG: "Choose a path on a file system that takes larger files",
    errno.EACCES: "Choose a folder that you may write to",
    errno.EPERM: "Choose a folder that you may write to",
    errno.EROFS: "Choose a path on a disk that is not read-only",
    errno.ENOENT: "Create the folder first, or choose another path",
    errno.ENOTDIR: "A part of the path is a file: choose another path",
    errno.EISDIR: "Give the path of a file, not of a folder",
    errno.ENAMETOOLONG: "Choose a shorter file name",
}


def check_writable(path: StrPath) -> None:
    """Find out before a long run whether its result can be written to ``path``; leaves nothing behind.

    Raises:
        WriteError: it cannot; the message says why and the hint what to do.
    """
    path = Path(path)
    with _explained(path):
        _refuse_folder(path)
        if _is_device(path):
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        probe = _beside(path)
        try:
            probe.open("xb").close()
        finally:
            probe.unlink(missing_ok=True)


def write_text(path: StrPath, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path``, whole or not at all.

    A half of a surrogate pair, as names of files hold that are no UTF-8, is written as U+FFFD: nothing else could be
    read again.

    Raises:
        WriteError: no space, no permission, no such folder; the old content is untouched.
    """
    write_file(path, lambda stream: stream.write(_SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text).encode()))


def write_file(path: StrPath, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then flush it to disk and rename it into place.

    Raises:
        WriteError: as for `write_text`. Whatever else ``write`` raises passes through; no half file is left
            either way.
    """
    path = Path(path)
    with _explained(path):
        _refuse_folder(path)
        if _is_device(path):
            with path.open("wb") as stream:
                write(stream)
            return
        target = path.resolve() if path.is_symlink() else path
        beside = _beside(target)
        try:
            with beside.open("xb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A fresh name in the same folder, so that the rename stays on one file system."""
    return path.with_name(f".{path.stem[:100]}.{secrets.token_hex(4)}{path.suffix}")


def _is_device(path: Path) -> bool:
    """Whether ``path`` is a pipe or a device such as /dev/stdout, which cannot be replaced by a rename."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an operating system error into one line with a reason and a next step."""
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


def refused(name: object, error: OSError) -> WriteError:
    """What to say where the operating system would not let ``name`` be written."""
    reason = (error.strerror or str(error)).lower()
    return WriteError(f"cannot write {name}: {reason}", _HINTS.get(error.errno or 0, "Choose another path"))
