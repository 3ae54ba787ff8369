"""SQLite opens files in C: each database is given its path in the overlay, and no other file is let through."""

from __future__ import annotations

import os
import sqlite3
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

from vramfit.files import real
from vramfit.files.calls import Calls
from vramfit.files.overlay import Overlay, Where
from vramfit.patching import PatchStack

_URI = 6
"""Position of ``uri`` behind the database among the arguments of `sqlite3.connect`."""
_IN_MEMORY = ("", ":memory:")


def install(calls: Calls, patches: PatchStack, *, guarded: bool) -> None:
    """Replace `sqlite3.connect`.

    Where the kernel does not refuse what statements attach (`guarded`), an authorizer does.
    """
    connect = sqlite3.connect

    def connect_there(database: Any, *args: Any, **options: Any) -> Any:
        uri = options.get("uri", args[_URI] if len(args) > _URI else False)
        connection = connect(_place(calls, database, bool(uri)), *args, **options)
        if not guarded:
            connection.set_authorizer(_guard(calls.overlay))
        return connection

    connect_there.__name__ = connect_there.__qualname__ = "connect"
    modules = [sqlite3, sqlite3.dbapi2, sys.modules.get("_sqlite3")]
    for module in modules:
        if module is not None:
            patches.set(module, "connect", connect_there)
    patches.rebind([(connect, connect_there)])


def is_allowed(overlay: Overlay, database: Any) -> bool:
    """Whether SQLite may open what it calls a database, because that would write to no real file."""
    if not isinstance(database, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(database)
    if text.startswith("file:"):
        path, query = _read(text)
        if _is_in_memory(path, query) or _is_read_only(query):
            return True
        text = path
    return text in _IN_MEMORY or (text.startswith("/") and "/../" not in text and overlay.is_through(text))


def _guard(overlay: Overlay) -> Callable[..., int]:
    """An authorizer (sqlite.org/c3ref/set_authorizer.html), since ATTACH and VACUUM INTO name files past `connect`."""

    def allow(action: int, database: str | None, *rest: object) -> int:
        if action == sqlite3.SQLITE_ATTACH and not is_allowed(overlay, database):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    return allow


def _place(calls: Calls, database: Any, is_uri: bool) -> Any:
    """What to open in place of a database."""
    if not isinstance(database, (str, bytes, os.PathLike)) or os.fsdecode(database) in _IN_MEMORY:
        return database
    text = os.fsdecode(database)
    if not (is_uri and text.startswith("file:")):
        return _set_aside(calls, text)
    path, query = _read(text)
    if _is_in_memory(path, query):
        return text
    where = calls.place(path).real if _is_read_only(query) else _set_aside(calls, path)
    rest = urllib.parse.urlsplit(text).query
    return f"file:{urllib.parse.quote(where)}{'?' + rest if rest else ''}"


def _set_aside(calls: Calls, path: str) -> str:
    """The path of a database in the overlay, with the files that SQLite keeps beside it."""
    overlay = calls.overlay
    place = calls.place(path)
    if place.where is Where.THROUGH:
        return place.real
    with overlay.changing():
        for ending in ("-journal", "-wal", ""):
            found = calls.place(path + ending)
            if found.found is not None:
                where = overlay.copy_up(found)
        if place.found is None:
            where = overlay.prepare(place)
            # So that it is known to be there.
            real.close(real.open_fd(where, os.O_WRONLY | os.O_CREAT, 0o644))
    return where


def _read(uri: str) -> tuple[str, dict[str, list[str]]]:
    """The path and the options of a URI of SQLite (sqlite.org/uri.html)."""
    parsed = urllib.parse.urlsplit(uri)
    return urllib.parse.unquote(parsed.path), urllib.parse.parse_qs(parsed.query)


def _is_in_memory(path: str, query: dict[str, list[str]]) -> bool:
    return query.get("mode") == ["memory"] or path in _IN_MEMORY


def _is_read_only(query: dict[str, list[str]]) -> bool:
    return query.get("mode") == ["ro"] or "immutable" in query
