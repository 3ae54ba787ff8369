"""The net below the patches: a write that no patch led away is refused before it reaches a real file.

Python announces every file operation of its own to audit hooks (PEP 578), wherever it was called from. What the patches
led away has a path in the overlay by then; anything else that would write was not led, and raises. A hook cannot be
removed, so there is one for the process, which does nothing while no overlay stands.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn

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
    """Watch over an overlay.

    Args:
        overlay: whose paths may be written to.
        patches: takes the watch back.
        guarded: whether the kernel keeps other processes from writing.
    """
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
    """Hear of an event: of the interpreter's last ones too, when this module has no names any more."""
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
