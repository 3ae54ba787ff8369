"""Replaces the file functions of ``os``, ``io`` and what the standard library builds on them.

``os`` takes its functions from ``posix``, and importlib looks there: both are replaced. ``pathlib``, ``shutil``,
``tempfile``, ``glob`` and ``zipfile`` ask ``os`` and ``io`` each time they are called, but for what classes of ``glob``
keep since Python 3.13, with which ``pathlib`` looks for files.
"""

from __future__ import annotations

import _io
import builtins
import glob
import io
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from vramfit.files import real
from vramfit.files.calls import Calls
from vramfit.files.overlay import Where
from vramfit.files.patches.opening import make_file_io, make_open
from vramfit.patching import PatchStack

_OWN = (
    *("stat", "lstat", "access", "readlink", "listdir", "scandir", "getcwd", "getcwdb", "chdir", "fchdir"),
    *("open", "mkdir", "mkfifo", "mknod", "symlink", "link", "unlink", "rmdir", "rename", "replace"),
    *("utime", "chmod", "truncate"),
)
"""Functions that `Calls` has under the same name."""
_CHANGING = ("chown", "lchown", "lchmod", "setxattr", "removexattr", "chflags", "lchflags")
_BY_DESCRIPTOR = {"fchmod": "chmod", "fchown": "chown"}
_LOOKING = ("statvfs", "pathconf", "getxattr", "listxattr")
_SETS = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")
_SUN_PATH = 100
"""Bytes that the path of a socket may have (sys/un.h: 108 on Linux, 104 on macOS, with the ending zero)."""


def install(calls: Calls, patches: PatchStack) -> None:
    """Replace them all."""
    table: list[tuple[object, object]] = []
    replacements = {
        **{name: getattr(calls, name) for name in _OWN},
        "remove": calls.unlink,
        **{name: _changing(calls, getattr(os, name, None), name) for name in _CHANGING},
        **{name: _looking(calls, getattr(os, name, None)) for name in _LOOKING},
    }
    for name, call in replacements.items():
        _replace(name, call, patches, table)
    for name, same in _BY_DESCRIPTOR.items():
        _replace(name, getattr(os, same, None), patches, table)
    _replace_sets({id(old): new for old, new in table}, patches)
    _replace_open(calls, patches, table)
    _replace_defaults({id(old): new for old, new in table}, patches)
    _replace_sockets(calls, patches)
    _replace_kept({id(old): new for old, new in table}, patches)
    _let_python_copy(patches)
    patches.rebind(table)
    _redirect_temporary(calls.overlay.policy.temporary, patches)


def _replace(name: str, call: Any, patches: PatchStack, table: list[tuple[object, object]]) -> None:
    """Replace a function of `os`, if this system has it."""
    if not hasattr(os, name):
        return
    old = getattr(os, name)

    def replacement(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    # A plain function, named as the original: bound methods compare and pickle otherwise.
    replacement.__name__ = replacement.__qualname__ = name
    replacement.__module__ = os.name
    replacement.__doc__ = old.__doc__
    patches.set(os, name, replacement)
    system = sys.modules.get(os.name)
    if system is not None and hasattr(system, name):
        patches.set(system, name, replacement)
    table.append((old, replacement))


def _changing(calls: Calls, original: Any, name: str) -> Callable[..., Any]:
    at_link = name.startswith("l")

    def change(path: Any, *args: Any, **options: Any) -> Any:
        if at_link and "follow_symlinks" not in options:
            where = calls.changing_place(path, follow=False)
            return original(where, *args, **options)
        return calls.change(path, original, *args, **options)

    return change


def _looking(calls: Calls, original: Any) -> Callable[..., Any]:
    def look(path: Any = ".", *args: Any, **options: Any) -> Any:
        return calls.look("." if path is None else path, original, *args, **options)

    return look


def _replace_sets(table: dict[int, object], patches: PatchStack) -> None:
    """Put replacements beside their originals in `os.supports_dir_fd` and its like."""
    for name in _SETS:
        known = getattr(os, name)
        patches.set(os, name, known | {table[id(one)] for one in known if id(one) in table})


def _replace_open(calls: Calls, patches: PatchStack, table: list[tuple[object, object]]) -> None:
    opened = make_open(calls)
    file_io = make_file_io(calls)

    def open_code(path: Any) -> Any:
        return real.open_code(path if calls.overlay.untouched() else calls.reading(path))

    for module in (io, _io):
        patches.set(module, "open", opened)
        patches.set(module, "FileIO", file_io)
        patches.set(module, "open_code", open_code)
    patches.set(builtins, "open", opened)
    table += [(real.open_file, opened), (real.FileIO, file_io), (real.open_code, open_code)]


def _replace_defaults(table: dict[int, object], patches: PatchStack) -> None:
    """Replace `os.unlink` where ``NamedTemporaryFile`` keeps it as a default of the function that deletes its file."""
    for function in list(vars(tempfile._TemporaryFileCloser).values()):  # type: ignore[attr-defined]
        defaults = getattr(function, "__defaults__", None) or ()
        if any(id(one) in table for one in defaults):
            patches.call(partial(setattr, function, "__defaults__", defaults))
            function.__defaults__ = tuple(table.get(id(one), one) for one in defaults)


def _replace_kept(table: dict[int, object], patches: PatchStack) -> None:
    """Replace what classes of `glob` keep as static methods."""
    for kept in [value for value in vars(glob).values() if isinstance(value, type)]:
        for name, value in list(vars(kept).items()):
            if isinstance(value, staticmethod) and id(value.__func__) in table:
                patches.set(kept, name, staticmethod(table[id(value.__func__)]))  # type: ignore[arg-type]


def _let_python_copy(patches: PatchStack) -> None:
    """Keep the kernel from copying a file's contents: it would fill every hole of the copy."""
    # `Path.copy` is new in Python 3.14, and so are the other ways of `shutil`.
    own = sys.modules.get("pathlib._os")
    ways: list[tuple[Any, str, object]] = [
        (shutil, "_USE_CP_SENDFILE", False),
        (shutil, "_USE_CP_COPY_FILE_RANGE", False),
    ]
    ways += [(own, name, None) for name in ("_ficlone", "_copy_file_range", "_sendfile", "_fcopyfile")]
    for module, name, without in ways:
        if hasattr(module, name):
            patches.set(module, name, without)


def _replace_sockets(calls: Calls, patches: PatchStack) -> None:
    """Lead away sockets that are named by a path, which the kernel makes."""
    if not hasattr(socket, "AF_UNIX"):
        return

    def replaced(name: str) -> Callable[..., Any]:
        original = getattr(socket.socket, name)

        def call(self: socket.socket, address: Any) -> Any:
            if self.family == socket.AF_UNIX and isinstance(address, (str, bytes)) and address:
                text = os.fsdecode(address)
                if not text.startswith("\0"):
                    address = _socket_path(calls, text, binding=name == "bind")
            return original(self, address)

        return call

    for name in ("bind", "connect", "connect_ex"):
        patches.set(socket.socket, name, replaced(name))


def _socket_path(calls: Calls, path: str, *, binding: bool) -> str:
    overlay = calls.overlay
    place = calls.place(path)
    if place.where is Where.THROUGH or (not binding and place.where in (Where.BELOW, Where.MOVED)):
        return place.real
    if binding and place.found is not None:
        return place.real  # fails by itself: the address is in use
    with overlay.changing():
        where = overlay.prepare(place)
    if len(os.fsencode(where)) < _SUN_PATH:
        return where
    # Open as long as the process, which may look the socket up by this path.
    folder = real.open_fd(os.path.dirname(where), os.O_RDONLY)
    return f"/proc/self/fd/{folder}/{os.path.basename(where)}"


def _redirect_temporary(folder: str, patches: PatchStack) -> None:
    """Let temporary files be real, in a folder of their own: subprocesses and sockets meet in them."""
    real.make_folders(folder)
    patches.item(os.environ, "TMPDIR", folder)
    patches.set(tempfile, "tempdir", None)
    # multiprocessing looks up once where it makes its own, and keeps that.
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        patches.item(config, "tempdir", None)
        del config["tempdir"]
    patches.call(lambda: _remove_folder_of_processes(config.get("tempdir")))
    before = _fork_server()
    patches.call(lambda: _end_fork_server(before))


def _remove_folder_of_processes(folder: str | None) -> None:
    """Remove what multiprocessing made now; it would look for it when the interpreter ends."""
    for waiting in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if folder is not None and folder in (waiting._args or ()):
            waiting()


def _fork_server() -> int | None:
    """The process that multiprocessing forks others from, from Python 3.14 on wherever nothing else is asked for."""
    module = sys.modules.get("multiprocessing.forkserver")
    return None if module is None else module._forkserver._forkserver_pid


def _end_fork_server(before: int | None) -> None:
    """End one that the program has started: its socket lies in the temporary folder, which goes."""
    if _fork_server() not in (None, before):
        sys.modules["multiprocessing.forkserver"]._forkserver._stop()
