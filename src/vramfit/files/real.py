"""The system's own file calls, taken before anything is replaced: the overlay itself works with them. No torch."""

from __future__ import annotations

import _io
import contextlib
import errno
import io
import os
import stat as modes
import sys
from typing import Any

access = os.access
chdir = os.chdir
chmod = os.chmod
close = os.close
fstat = os.fstat
getcwd = os.getcwd
link = os.link
listdir = os.listdir
lseek = os.lseek
lstat = os.lstat
mkdir = os.mkdir
open_fd = os.open
read = os.read
readlink = os.readlink
rename = os.rename
replace = os.replace
rmdir = os.rmdir
scandir = os.scandir
stat = os.stat
symlink = os.symlink
truncate = os.truncate
unlink = os.unlink
utime = os.utime
write = os.write

FileIO = _io.FileIO
open_file = io.open
open_code = io.open_code

BINARY = getattr(os, "O_BINARY", 0)
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
_STEP = 1 << 20


def exists(path: str) -> bool:
    """Whether something lies at a path, dangling links included."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str) -> bool:
    """Whether a folder lies at a path, links not followed."""
    try:
        return modes.S_ISDIR(lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def make_folders(path: str) -> None:
    """Make a folder and those above it."""
    if not is_folder(path):
        make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            mkdir(path)


def copy_contents(source: str, target: str, most: int) -> bool:
    """Copy a file's bytes into a new file, its holes as holes; returns whether the bytes were copied.

    A file of more than `most` bytes is copied as a hole of its size.
    """
    reading = open_fd(source, os.O_RDONLY | BINARY | CLOSE_ON_EXEC)
    try:
        size = fstat(reading).st_size
        writing = open_fd(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY | CLOSE_ON_EXEC, 0o600)
        try:
            if size:
                truncate(writing, size)
            if allocated(fstat(reading)) > most:
                return False
            for start, end in data_ranges(reading, size):
                _copy_range(reading, writing, start, end)
        finally:
            close(writing)
    finally:
        close(reading)
    return True


def data_ranges(file: int, size: int) -> Any:
    """The ranges of a file that are not holes."""
    position = 0
    while position < size:
        start, end = position, size
        if hasattr(os, "SEEK_DATA"):
            try:
                start = lseek(file, position, os.SEEK_DATA)
                end = lseek(file, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole to the end
                    return
                start, end = position, size
        yield start, end
        position = end


def _copy_range(reading: int, writing: int, start: int, end: int) -> None:
    lseek(reading, start, os.SEEK_SET)
    lseek(writing, start, os.SEEK_SET)
    while start < end:
        data = read(reading, min(_STEP, end - start))
        if not data:
            return
        start += len(data)
        view = memoryview(data)
        while view:
            view = view[write(writing, view) :]


def allocated(found: os.stat_result) -> int:
    """Bytes of disk that a file occupies."""
    return getattr(found, "st_blocks", -(-found.st_size // 512)) * 512


def copy_metadata(source: str, target: str) -> None:
    """Give a copy the mode, the owner, the attributes and the times of what it was copied from."""
    found = lstat(source)
    if modes.S_ISLNK(found.st_mode):
        with contextlib.suppress(OSError, NotImplementedError):
            utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
        return
    if hasattr(os, "chown") and (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
        with contextlib.suppress(OSError):
            os_chown(target, found.st_uid, found.st_gid)
    if os_listxattr is not None:
        with contextlib.suppress(OSError):
            for name in os_listxattr(source):
                os_setxattr(target, name, os_getxattr(source, name))
    chmod(target, modes.S_IMODE(found.st_mode))
    utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


os_chown: Any = getattr(os, "chown", None)
os_listxattr: Any = getattr(os, "listxattr", None)
os_getxattr: Any = getattr(os, "getxattr", None)
os_setxattr: Any = getattr(os, "setxattr", None)


def path_of_fd(fd: int) -> str | None:
    """The path by which a descriptor was opened, None where it has none or the system does not show it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            found = readlink(f"/proc/self/fd/{fd}")
            return found if found.startswith("/") else None
    elif sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, 50, b"\0" * 1024).rstrip(b"\0").decode()  # F_GETPATH of sys/fcntl.h
    return None


def is_open_for_writing(path: str) -> bool:
    """Whether a path is a descriptor's in /proc that was opened for writing (proc_pid_fdinfo(5))."""
    folder, _, name = path.rpartition("/")
    if not folder.endswith("/fd"):
        return False
    with open_file(f"{folder}info/{name}", encoding="ascii") as facts:
        flags = next((line.split()[1] for line in facts if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR))


def failure(number: int, path: str) -> OSError:
    """The error that the system would have raised."""
    return OSError(number, os.strerror(number), path)
