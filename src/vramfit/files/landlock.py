"""Landlock: the kernel refuses writes outside some folders, to this process and all that it starts. Linux; no torch.

The patches lead Python's writes away; Landlock stops those of compiled libraries and of subprocesses, which no
patch sees. They fail then with "Permission denied" instead of replacing a file. It cannot be taken back, so it is for
a process that ends with the program. Constants are those of include/uapi/linux/landlock.h and the system call numbers
those of include/uapi/asm-generic/unistd.h; man 7 landlock describes both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat as modes
import struct
import sys
from collections.abc import Iterable

from vramfit.files import real

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS of linux/prctl.h
_FILE = 1 << 1  # WRITE_FILE
_FOLDER = sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_REFER_SINCE, _TRUNCATE_SINCE = 2, 3


def version() -> int:
    """The version of Landlock that the kernel has; 0 without."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))


def restrict(writable: Iterable[str]) -> bool:
    """Let this process and its children write below these paths alone, from now on; whether the kernel does so.

    Args:
        writable: folders and files; those that do not exist are left out.
    """
    found = version()
    if not found:
        return False
    handled = _FILE | _FOLDER
    handled |= _REFER if found >= _REFER_SINCE else 0
    handled |= _TRUNCATE if found >= _TRUNCATE_SINCE else 0
    attributes = struct.pack("Q", handled)
    ruleset = _syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        for path in writable:
            with contextlib.suppress(OSError):
                _allow(ruleset, path, handled)
        if _prctl(_NO_NEW_PRIVILEGES, 1) != 0:
            return False
        return _syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0
    finally:
        real.close(ruleset)


def _allow(ruleset: int, path: str, handled: int) -> None:
    where = real.open_fd(path, os.O_PATH | real.CLOSE_ON_EXEC)
    try:
        is_folder = modes.S_ISDIR(real.fstat(where).st_mode)
        allowed = handled if is_folder else handled & (_FILE | _TRUNCATE)
        rule = struct.pack("=Qi", allowed, where)
        _syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_BENEATH), rule, ctypes.c_uint(0))
    finally:
        real.close(where)


def _syscall(number: int, *args: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return int(library.syscall(ctypes.c_long(number), *args))


def _prctl(option: int, value: int) -> int:
    nothing = ctypes.c_ulong(0)
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), nothing, nothing, nothing))
