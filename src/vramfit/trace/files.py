"""Reads files whole and writes them whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from vramfit.errors import TraceFormatError, WriteError

MAX_FILE_BYTES = 16 << 30
"""Larger files are refused before they are read: no trace is that long, and memory would not hold it."""

_HINTS = {
    errno.ENOSPC: "Free some space or choose a path on another disk",
    errno.EDQUOT: "Free some of your quota or choose a path on another disk",
    errno.EFBIG: "Choose a path on a file system that takes larger files",
    errno.EACCES: "Choose a folder that you may write to",
    errno.EPERM: "Choose a folder that you may write to",
    errno.EROFS: "Choose a path on a disk that is not read-only",
    errno.ENOENT: "Create the folder first, or choose another path",
    errno.EISDIR: "Give the path of a file, not of a folder",
}


def read_file(path: Path) -> bytes:
    """The content of a trace or snapshot file.

    Raises:
        TraceFormatError: it is missing, not a file, not readable, empty or too large.
    """
    try:
        if path.is_dir():
            raise TraceFormatError(f"cannot read {path}: it is a folder", "Give the file inside it")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TraceFormatError(f"cannot read {path}: its {size} bytes are more than a trace can have")
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TraceFormatError(
            f"cannot read {path}: {reason}", "Check the path and its permissions"
        ) from error
    if not data:
        raise TraceFormatError(f"cannot read {path}: the file is empty", "Record or copy it again")
    return data


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then flush it to disk and rename it into place.

    Raises:
        WriteError: no space, no permission, no such folder. What was at ``path`` before is untouched.
    """
    with _explained(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced by a rename
            with path.open("wb") as stream:
                write(stream)
            return
        target = path.resolve() if path.is_symlink() else path
        beside = target.with_name(f".{target.stem[:100]}.{secrets.token_hex(4)}{target.suffix}")
        try:
            with beside.open("xb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = _HINTS.get(error.errno or 0, "Choose another path")
        raise WriteError(f"cannot write {path}: {reason}", hint) from error
