"""The system calls that Python 3.11 lacks: unshare, mount, open_tree, pivot_root, capset. Linux only.

Each raises the OSError that the kernel gives; its file name is the path concerned, or the call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
from typing import Any

NEW_MOUNTS = 0x20000  # CLONE_NEWNS, linux/sched.h
NEW_USER = 0x10000000  # CLONE_NEWUSER

NO_SETUID, NO_DEVICES, NO_EXEC = 0x2, 0x4, 0x8  # MS_NOSUID, MS_NODEV, MS_NOEXEC, linux/mount.h
READ_ONLY, BIND, MOVE, RECURSIVE, PRIVATE = 0x1, 0x1000, 0x2000, 0x4000, 1 << 18
DETACH = 0x2  # MNT_DETACH

_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, linux/falloc.h
_AT_FDCWD = -100
_AT_RECURSIVE, _AT_EMPTY_PATH, _TREE_CLONE = 0x8000, 0x1000, 0x1
_OPEN_TREE = 428  # Linux 5.2
_MOUNT_SETATTR = 442  # the same on every architecture that had it from the start (Linux 5.12)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217, "loongarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91, "riscv64": 91, "ppc64le": 184, "s390x": 185, "loongarch64": 91}
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, linux/capability.h
_DROP_FROM_BOUND = 24  # PR_CAPBSET_DROP, linux/prctl.h


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _call(numbers: dict[str, int], what: str, *arguments: Any) -> None:
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(38, f"the number of this call is not known on {platform.machine()}", what)
    _check(_libc().syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    """Leave the namespaces that this process shares with others.

    Raises:
        OSError: EPERM where it is not allowed, EINVAL with several threads, ENOSPC at the limit of user namespaces.
    """
    _check(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """Mount, see mount(2)."""
    encoded = None if kind is None else kind.encode()
    options = data.encode("utf-8", "surrogateescape") or None
    _check(
        _libc().mount(
            os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), ctypes.c_char_p(options)
        ),
        target,
    )


def unmount(target: str, flags: int = DETACH) -> None:
    """Take a mount away, see umount2(2)."""
    _check(_libc().umount2(os.fsencode(target), flags), target)


def pivot_root(new: str, old: str) -> None:
    """Make a folder the root, and put the old root on another, see pivot_root(2)."""
    _call(_PIVOT_ROOT, new, os.fsencode(new), os.fsencode(old))


def make_read_only(point: str) -> None:
    """Let nothing be written through one mount of this namespace; its other flags stay. See mount_setattr(2).

    Raises:
        OSError: ENOSYS before Linux 5.12.
    """
    _set_read_only(_AT_FDCWD, point, 0)


def read_only_copy(path: str) -> int:
    """A descriptor of a copy of all mounts from a folder down, through which nothing is written, not even times."""
    number: int = _libc().syscall(
        ctypes.c_long(_OPEN_TREE),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_uint(_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE),
    )
    _check(min(number, 0), path)
    _set_read_only(number, "", _AT_EMPTY_PATH | _AT_RECURSIVE)
    return number


def _set_read_only(folder: int, path: str, flags: int) -> None:
    # struct mount_attr: set, clear, propagation, namespace
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    _check(
        _libc().syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_int(folder),
            os.fsencode(path),
            ctypes.c_uint(flags),
            attributes,
            ctypes.c_size_t(len(attributes)),
        ),
        path,
    )


def drop_contents(file: int, size_bytes: int) -> None:
    """Turn an open file into one hole of the same size, see fallocate(2).

    Raises:
        OSError: EOPNOTSUPP where the file system has no holes.
    """
    offset, length = ctypes.c_int64(0), ctypes.c_int64(size_bytes)
    _check(_libc().fallocate64(ctypes.c_int(file), ctypes.c_int(_PUNCH_HOLE), offset, length), "fallocate")


def set_capabilities(*, effective: int, permitted: int, inheritable: int) -> None:
    """Replace this thread's capabilities, each a set of bits, see capset(2).

    Raises:
        OSError: EPERM for more than there are.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    low, high = (
        struct.pack("III", *((bits >> shift) & 0xFFFFFFFF for bits in (effective, permitted, inheritable)))
        for shift in (0, 32)
    )
    _call(_CAPSET, "capset", header, low + high)


def drop_from_bound(capability: int) -> None:
    """Never again have a capability in this process and its children, see capabilities(7).

    Raises:
        OSError: EINVAL for one that the kernel does not have.
    """
    zero = ctypes.c_ulong(0)
    _check(
        _libc().prctl(ctypes.c_int(_DROP_FROM_BOUND), ctypes.c_ulong(capability), zero, zero, zero), "prctl"
    )
