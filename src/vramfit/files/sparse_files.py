"""Files of the overlay on disk: zeros as holes, and no more than the disk that the policy allows. No torch."""

from __future__ import annotations

import _io
import contextlib
import ctypes
import os
import stat as modes
import sys
import time
from collections.abc import Callable
from typing import Any

from vramfit.files import real

BLOCK = 4096
"""Bytes of a file system's block: shorter runs of zeros save nothing."""
_CHUNK = 1 << 16
_STEP = _CHUNK
"""Bytes that are written, or left out, at once."""
_ZEROS = bytes(_CHUNK)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
_HEAD = 1 << 20
"""Bytes at the start of a file that are kept where its contents have no room: headers lie there."""
_BETWEEN = 1.0
"""Seconds between two looks at how much disk is occupied, once there was no room."""


class DiskAllowance:
    """The disk that set-aside files may occupy, and what they occupy of it.

    Args:
        upper: the folder in which they lie.
        cap_bytes: the most that they may occupy.
        spent: one number that forked processes share: the bytes that were counted.
        tell: called with a note for the report.
    """

    def __init__(self, upper: str, cap_bytes: int, spent: memoryview, tell: Callable[[str], object]) -> None:
        self.cap_bytes = cap_bytes
        self.spent = spent
        self._upper = upper
        self._tell = tell
        self._full = -_BETWEEN

    def room(self) -> int:
        """Bytes that set-aside files may still occupy."""
        return max(0, self.cap_bytes - self.spent[0])

    def spend(self, count: int) -> bool:
        """Account for bytes that are written; False where there is no room for them."""
        # What was counted may have been overwritten or deleted since, which a look at the disk shows.
        if self.spent[0] + count > self.cap_bytes:
            if time.monotonic() < self._full + _BETWEEN:
                return False
            if self.measure() + count > self.cap_bytes:
                self._full = time.monotonic()
                return False
        self.spent[0] += max(0, count)
        return True

    def measure(self) -> int:
        """Bytes of disk that set-aside files occupy."""
        total, waiting = 0, [self._upper]
        while waiting:
            with contextlib.suppress(FileNotFoundError):
                for entry in real.scandir(waiting.pop()):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += real.allocated(entry.stat(follow_symlinks=False))
        self.spent[0] = total
        return total

    def dropped(self, path: str) -> None:
        """Note once that contents had no room."""
        self._tell(
            f"set-aside files reached {self.cap_bytes / (1 << 30):.1f} GiB of disk: the contents of what was "
            f"written after that were dropped, their sizes kept (first {path})"
        )


def is_zero(view: memoryview) -> bool:
    """Whether all bytes are zero."""
    if any(view[:64]):
        return False
    # Compared as bytes: memoryview compares element by element, memcmp is a hundred times as fast.
    return all(
        bytes(view[start : start + _CHUNK]) == _ZEROS[: min(_CHUNK, len(view) - start)]
        for start in range(0, len(view), _CHUNK)
    )


class SetAsideFile(_io.FileIO):
    """A raw file of the upper folder: zeros become holes, and contents beyond the allowed disk as well."""

    disk: DiskAllowance
    shown: Any

    def write(self, data: Any) -> int:
        """See `io.RawIOBase.write`."""
        view = memoryview(data).cast("B")
        if len(view) <= _STEP:
            return self._write(view)
        return sum(self._write(view[start : start + _STEP]) for start in range(0, len(view), _STEP))

    def _write(self, view: memoryview) -> int:
        count = len(view)
        if count >= BLOCK and is_zero(view) and self._skip(count):
            return count
        if not self.disk.spend(count):
            self.disk.dropped(os.fsdecode(self.shown))
            if self._skip(count):
                return count
        return super().write(view) or 0

    def _skip(self, count: int) -> bool:
        """Move over bytes that hold nothing; False where they must replace something that is there already."""
        descriptor = self.fileno()
        found = real.fstat(descriptor)
        if not modes.S_ISREG(found.st_mode):
            return False
        appending = "a" in self.mode
        position = found.st_size if appending else self.tell()
        if position < found.st_size:
            return False
        super().truncate(position + count)
        self.seek(position + count)
        return True

    def close(self) -> None:
        """See `io.IOBase.close`; what was written past `write`, by NumPy or sendfile, is looked through first."""
        if not self.closed and self.writable():
            with contextlib.suppress(OSError, ValueError):
                settle(self.disk, self.fileno(), os.fsdecode(self.shown))
        super().close()


def settle(disk: DiskAllowance, descriptor: int, path: str) -> None:
    """Dig holes where a file of the upper folder holds zeros, and drop its contents where they have no room.

    `descriptor` is open for writing, and `path` is the program's name of the file.
    """
    found = real.fstat(descriptor)
    if not modes.S_ISREG(found.st_mode) or real.allocated(found) <= _HEAD or _fallocate() is None:
        return
    reading = real.open_fd(f"/proc/self/fd/{descriptor}", os.O_RDONLY | real.CLOSE_ON_EXEC)
    try:
        for start, end in list(real.data_ranges(reading, found.st_size)):
            _dig_zeros(reading, descriptor, start, end)
    finally:
        real.close(reading)
    if disk.measure() > disk.cap_bytes:
        _punch(descriptor, _HEAD, found.st_size)
        disk.dropped(path)


def settle_path(disk: DiskAllowance, real_path: str, path: str) -> None:
    """Settle a file that a compiled library wrote."""
    with contextlib.suppress(OSError):
        descriptor = real.open_fd(real_path, os.O_RDWR | real.CLOSE_ON_EXEC)
        try:
            settle(disk, descriptor, path)
        finally:
            real.close(descriptor)


def _dig_zeros(reading: int, writing: int, start: int, end: int) -> None:
    for position in range(start - start % _STEP, end, _STEP):
        data = os.pread(reading, _STEP, position)
        if data and is_zero(memoryview(data)):
            _punch(writing, position, position + len(data))


def _punch(descriptor: int, start: int, end: int) -> None:
    fallocate = _fallocate()
    if fallocate is not None and end > start:
        fallocate(
            descriptor,
            _PUNCH_HOLE | _KEEP_SIZE,
            ctypes.c_longlong(start),
            ctypes.c_longlong(end - start),
        )


_found: list[Callable[..., int] | None] = []


def _fallocate() -> Callable[..., int] | None:
    if not _found:
        call = getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform == "linux" else None
        _found.append(call)
    return _found[0]
