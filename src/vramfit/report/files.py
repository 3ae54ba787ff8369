"""What a virtual run would have done to files, in a few lines: value in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vramfit.trace import ChangeKind, FileChange, FileChanges
from vramfit.units import counted, format_bytes

_NAMED = 4
"""Paths that are named of each kind; --json lists them all."""
_TITLES = {
    "discard": "Files: what it wrote was set aside and dropped",
    "keep": "Files: what it wrote was set aside and kept",
}
_KINDS = {
    ChangeKind.REPLACED: ("would have replaced", "file"),
    ChangeKind.DELETED: ("would have deleted", "path"),
    ChangeKind.WRITTEN: ("would have written", "file"),
    ChangeKind.FOLDER: ("would have made", "folder"),
    ChangeKind.METADATA: ("would have changed times or modes of", "path"),
}


def files_lines(changes: FileChanges | None, relative: Callable[[str], str]) -> list[str]:
    """A title and a line for each kind of change; empty where there is nothing to tell.

    Args:
        changes: what happened; None where nobody looked.
        relative: shortens a path for people.
    """
    if changes is None or changes.writes not in _TITLES or not (changes.entries or changes.notes):
        return []
    lines = [_TITLES[changes.writes]]
    for kind, (did, what) in _KINDS.items():
        if entries := changes.of(kind):
            lines.append(_line(did, what, entries, relative))
    if changes.omitted:
        lines.append(f"and {counted(changes.omitted, 'change')} more")
    lines += changes.notes
    if changes.kept_at is not None:
        lines.append(f"kept in {relative(changes.kept_at)}")
    why = f" ({changes.reason})" if changes.reason else ""
    lines.append(f"the real files were protected by {changes.backend}{why}")
    return lines


def _line(did: str, what: str, entries: Sequence[FileChange], relative: Callable[[str], str]) -> str:
    size = sum(entry.size_bytes for entry in entries)
    total = f", {format_bytes(size)}" if size else ""
    named = ", ".join(relative(entry.path) for entry in entries[:_NAMED])
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return f"{did} {counted(len(entries), what)}{total}: {named}{more}"
