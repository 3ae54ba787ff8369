"""What a virtual run would have done to files: which it would have written, replaced, renamed and deleted. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ChangeKind(Enum):
    """What would have happened to a path."""

    WRITTEN = "written"
    """A file that did not exist."""
    REPLACED = "replaced"
    """A file that existed has other contents, or another file's."""
    DELETED = "deleted"
    """A file or a folder is gone, moved away included."""
    FOLDER = "folder"
    """A folder that did not exist."""
    METADATA = "metadata"
    """Times, mode or owner alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One path that would be otherwise.

    Attributes:
        path: absolute, as the program knows it.
        kind: what would have happened.
        size_bytes: of the file as the program left it; of what was there before where it is deleted.
    """

    path: str
    kind: ChangeKind
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChanges:
    """What a virtual run would have done to files.

    Attributes:
        backend: what kept it from the real files: ``namespace``, ``patches``, or ``none`` where they were written.
        writes: what was asked for: ``discard``, ``keep`` or ``real``.
        entries: sorted by path. A folder that is deleted stands for all in it.
        reason: why it was not the better backend; empty where it was.
        kept_at: the folder that holds what was set aside, None if it was dropped.
        notes: limits that were met: contents that were dropped, processes that nothing protected from.
        omitted: entries that were left out, beyond the most that are listed.
    """

    backend: str
    writes: str
    entries: tuple[FileChange, ...] = ()
    reason: str = ""
    kept_at: str | None = None
    notes: tuple[str, ...] = ()
    omitted: int = 0

    def of(self, kind: ChangeKind) -> tuple[FileChange, ...]:
        """Entries of one kind."""
        return tuple(entry for entry in self.entries if entry.kind is kind)
