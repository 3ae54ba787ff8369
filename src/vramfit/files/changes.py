"""Puts together what a protection tells: sorted, and no longer than a report can be. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from vramfit.files.policy import Backend, FilePolicy, Writes
from vramfit.trace.file_changes import ChangeKind, FileChange, FileChanges

MOST_ENTRIES = 10_000
"""Entries that a report lists."""

__all__ = ["ChangeKind", "FileChange", "FileChanges", "summarise"]


def summarise(
    policy: FilePolicy,
    backend: Backend,
    entries: Iterable[FileChange],
    *,
    reason: str = "",
    notes: Iterable[str] = (),
) -> FileChanges:
    """The facts of a protected run.

    Args:
        policy: what was kept.
        backend: what kept it.
        entries: what would have happened, in any order; Python's caches of compiled modules are left out.
        reason: why it was not the better backend.
        notes: limits that were met.
    """
    told = sorted(
        (entry for entry in entries if "__pycache__" not in entry.path), key=lambda entry: entry.path
    )
    return FileChanges(
        backend=backend.value,
        writes=policy.writes.value,
        entries=tuple(told[:MOST_ENTRIES]),
        reason=reason,
        kept_at=policy.folder if policy.writes is Writes.KEEP else None,
        notes=tuple(dict.fromkeys(notes)),
        omitted=max(0, len(told) - MOST_ENTRIES),
    )
