"""What stands below the patches: a write that none of them led away is refused before it reaches a real file.

Python announces every file operation of its own to audit hooks (PEP 578), wherever it was called from. What the patches
led away has a path in the overlay by then; anything else that would write was not led away, and raises. A hook cannot
be removed, so there is one for the process, which does nothing while no overlay stands.

NOTE [Landlock]
No patch and no hook sees writes of compiled libraries and of subprocesses. On Linux the kernel refuses them outside
some folders, to this process and all that it starts: they fail with "Permission denied" instead of replacing a file. It
cannot be taken back, so it is for a process that ends with the program. Constants are those of
include/uapi/linux/landlock.h and the system call numbers those of include/uapi/asm-generic/unistd.h; man 7 landlock
describes both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat as modes
import struct
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from vramfit.files import real
from vramfit.files.calls import WRITING
from vramfit.files.overlay import Overlay
from vramfit.files.patches.databases import is_allowed
from vramfit.patching import PatchStack

_PATHS = {
    "os.remove": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "os.setxattr": 1,
    "os.removexattr": 1,
    "os.chflags": 1,
    "os.lchmod": 1,
}
"""Events with how many of their first arguments are paths that would change."""
_SECOND = ("os.link", "os.symlink")
"""Events whose second argument is a path that would be made."""
_PROCESSES = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_STARTED = "other processes that the program started saw the files as they are on disk, without what it had set aside"
_GUARDED = f"{_STARTED}; the kernel (Landlock) kept them from writing"
_UNGUARDED = f"{_STARTED}; what they wrote is real"
_DATABASE = "sqlite3.connect"
_events = frozenset((*_PATHS, *_SECOND, *_PROCESSES, _DATABASE, "open"))
_watched: list[tuple[Overlay, bool]] = []
_hooked: list[bool] = []


def install(overlay: Overlay, patches: PatchStack, *, guarded: bool) -> None:
    """Watch over an overlay; `guarded` means that the kernel keeps other processes from writing."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)
    _watched.append((overlay, guarded))
    patches.call(_watched.clear)


def _hook(
    event: str,
    args: tuple[Any, ...],
    events: frozenset[str] = _events,
    watched: list[tuple[Overlay, bool]] = _watched,
) -> None:
    """Hear of an event, even of the interpreter's last ones, when this module has no names any more."""
    if event not in events or not watched:
        return
    overlay, guarded = watched[-1]
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & WRITING:
            _check(overlay, path)
    elif event in _PROCESSES:
        overlay.tell(_GUARDED if guarded else _UNGUARDED)
    elif event == _DATABASE:
        if not is_allowed(overlay, args[0]):
            _refuse(os.fsdecode(args[0]))
    elif event in _SECOND:
        _check(overlay, args[1])
    else:
        if event == "os.mkdir" and overlay.is_parent_of_through(os.fsdecode(args[0])):
            return  # a folder above one that is written for real
        for path in args[: _PATHS[event]]:
            _check(overlay, path)


def _check(overlay: Overlay, path: Any) -> None:
    if path is None or isinstance(path, int):
        return
    name = os.fsdecode(path)
    if not (name.startswith("/") and "/../" not in name and overlay.is_through(name)):
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise PermissionError(
        errno.EPERM,
        "vramfit refused to write to a real file, which a virtual run never does (see docs/files.md)",
        name,
    )


# -- The kernel: see NOTE [Landlock] ---------------------------------------------------------------------------


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS of linux/prctl.h
_FILE = 1 << 1  # WRITE_FILE
_FOLDER = sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_REFER_SINCE, _TRUNCATE_SINCE = 2, 3


def _landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 without."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))


def restrict_writes(writable: Iterable[str]) -> bool:
    """Let this process and its children write below these paths alone, from now on; returns whether the kernel does so.

    Paths that do not exist are left out.
    """
    found = _landlock_version()
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
