"""Reads trace and snapshot files whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from vramfit.errors import TraceFormatError
from vramfit.writing import StrPath

MAX_FILE_BYTES = 16 << 30
"""Larger files are refused before they are read: no trace is that long, and memory would not hold it."""


def read_file(path: StrPath) -> bytes:
    """The content of a trace or snapshot file.

    Raises:
        TraceFormatError: it is missing, a folder or a device, not readable, empty or too large.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise TraceFormatError(f"cannot read {path}: it is a folder", "Give the file inside it")
        described = path.stat()
        if stat.S_ISCHR(described.st_mode) and not path.samefile(os.devnull):
            raise TraceFormatError(
                f"cannot read {path}: it is a device, which may have no end", "Give a file, or a pipe"
            )
        size = described.st_size
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
