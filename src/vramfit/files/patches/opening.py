"""``open`` and ``io.FileIO`` on an overlay: the same files, arguments and errors, elsewhere on the disk."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from vramfit.files import real
from vramfit.files.calls import Calls
from vramfit.files.sparse_files import SetAsideFile

_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


def make_open(calls: Calls) -> Callable[..., Any]:
    """``open`` on an overlay."""

    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        rest = (encoding, errors, newline)
        flags = _flags(mode)
        if isinstance(file, int) or flags is None or not closefd:
            return real.open_file(file, mode, buffering, *rest, closefd, opener)
        writing = flags & (os.O_WRONLY | os.O_RDWR)
        if opener is None and not writing and calls.overlay.untouched():
            return real.open_file(file, mode, buffering, *rest)
        if opener is not None:  # it opens by itself, through os.open
            descriptor = opener(file, flags | real.CLOSE_ON_EXEC)
            made = real.open_file(descriptor, mode, buffering, *rest)
            return _named(made, file)
        try:
            where = calls.locate(file, flags)
            if not writing or not where.startswith(calls.overlay.upper):
                return _named(real.open_file(where, mode, buffering, *rest), file)
            return _set_aside(calls, file, where, mode, buffering, *rest)
        except OSError as error:
            error.filename = file
            raise

    open.__doc__ = io.open.__doc__
    open.__module__, open.__qualname__ = real.open_file.__module__, "open"  # so that it can be pickled
    return open


def _flags(mode: Any) -> int | None:
    """The flags of a mode; None for an invalid one, which the original refuses."""
    if not isinstance(mode, str) or set(mode) - set("rwxabt+") or len(set(mode)) != len(mode):
        return None
    if len(set(mode) & set("rwxa")) != 1 or set("bt") <= set(mode):
        return None
    flags = _FLAGS[next(letter for letter in mode if letter in _FLAGS)]
    return flags & ~os.O_WRONLY | os.O_RDWR if "+" in mode else flags


def _set_aside(
    calls: Calls,
    file: Any,
    where: str,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> Any:
    """Do what `io.open` does with a path (Lib/_pyio.py: open), around a raw file of our own."""
    binary = "b" in mode
    if binary and (encoding, errors, newline) != (None, None, None):
        return real.open_file(file, mode, buffering, encoding, errors, newline)  # raises what it should
    if not binary and buffering == 0:
        raise ValueError("can't have unbuffered text I/O")
    raw = SetAsideFile(where, mode.replace("b", "").replace("t", ""))
    raw.disk, raw.shown = calls.overlay.disk, file
    raw.name = file
    try:
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering < 0 or buffering == 1 else buffering
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffer = kind(raw, size)
        if binary:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]  # as io.open does
        return text
    except BaseException:
        raw.close()
        raise


def _named(made: Any, file: Any) -> Any:
    """The file, under the name that the program used."""
    raw = getattr(getattr(made, "buffer", made), "raw", made)
    if raw.name != file:
        raw.name = file
    return made


def make_file_io(calls: Calls) -> type:
    """``io.FileIO`` on an overlay; every raw file is an instance of it, as before."""

    class Meta(type(real.FileIO)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real.FileIO)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real.FileIO)

    class FileIO(SetAsideFile, metaclass=Meta):
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            self.disk, self.shown = calls.overlay.disk, file
            flags = _flags(mode)
            if isinstance(file, int) or flags is None:
                super().__init__(file, mode, closefd, opener)
                return
            if opener is not None:
                super().__init__(opener(file, flags | real.CLOSE_ON_EXEC), mode)
            else:
                try:
                    super().__init__(calls.locate(file, flags), mode)
                except OSError as error:
                    error.filename = file
                    raise
            self.name = file

        def write(self, data: Any) -> int:
            if isinstance(self.shown, int):
                return real.FileIO.write(self, data) or 0
            return super().write(data)

        def close(self) -> None:
            if isinstance(self.shown, int):
                real.FileIO.close(self)
            else:
                super().close()

    FileIO.__module__ = "_io"
    return FileIO
