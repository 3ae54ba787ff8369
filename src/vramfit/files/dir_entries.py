"""What `os.scandir` gives on an overlay: iterators and entries in the forms of `os`. No torch."""

from __future__ import annotations

import contextlib
import os
import stat as modes
from collections.abc import Callable, Iterator
from typing import Any


class DirEntries:
    """Stands for the iterator of `os.scandir` once anything was changed.

    Args:
        close: called when no more are wanted.
    """

    def __init__(self, made: Iterator[Any], close: Callable[[], object] = lambda: None) -> None:
        self._made = made
        self._close = close

    def __iter__(self) -> DirEntries:
        """Each name in the folder."""
        return self

    def __next__(self) -> Any:
        """The next entry."""
        return next(self._made)

    def __enter__(self) -> DirEntries:
        """As `os.scandir` does."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._made = iter(())
        self._close()


class DirEntry:
    """Stands for an `os.DirEntry`.

    Args:
        stat: `os.stat` as the program sees it.
        full: the absolute path of the entry, as the program knows it.
        given: what `os.scandir` was called with.
    """

    __slots__ = ("_full", "_stat", "name", "path")

    def __init__(self, stat: Callable[..., os.stat_result], full: str, given: Any, name: str) -> None:
        self._stat = stat
        self._full = full
        self.name: Any = name if isinstance(given, int) else like(given, name)
        self.path: Any = self.name if isinstance(given, int) else os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """See `os.DirEntry`."""
        return self._stat(self._full, follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See `os.DirEntry`."""
        try:
            return self._stat(self._full, follow_symlinks=follow_symlinks)
        except OSError as error:
            error.filename = self.path
            raise

    def is_symlink(self) -> bool:
        """See `os.DirEntry`."""
        return self._is(modes.S_ISLNK, False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """See `os.DirEntry`."""
        return self._is(modes.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """See `os.DirEntry`."""
        return self._is(modes.S_ISREG, follow_symlinks)

    def is_junction(self) -> bool:
        """See `os.DirEntry`."""
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return kind(self._stat(self._full, follow_symlinks=follow).st_mode)
        return False


def is_bytes(path: Any) -> bool:
    """Whether a path was given as bytes."""
    return isinstance(path, bytes) or (
        not isinstance(path, (str, int)) and isinstance(os.fspath(path), bytes)
    )


def like(path: Any, name: str) -> Any:
    """A name as bytes where the path was."""
    return os.fsencode(name) if is_bytes(path) else name
