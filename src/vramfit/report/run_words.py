"""A run in words: how it ended and what stays open, and what it would have done to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vramfit.analysis import NO_CARD, Verdict
from vramfit.trace import ChangeKind, FileChange, FileChanges, Run, Source
from vramfit.trace.outcome import End, Progress, Unit
from vramfit.units import counted, format_bytes

_HOW = {
    End.STEPS: "stopped",
    End.TIME: "stopped when its time was over",
    End.INTERRUPTED: "interrupted",
    End.TERMINATED: "terminated",
}
_LATER = "Not seen: what comes later, such as validation, checkpoints or larger batches."
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


def fits_words(progress: Progress) -> str:
    """The beginning of the headline of a run that fits, as far as it went."""
    if progress.end in (End.PROGRAM, End.STEPS):
        return "✓ fits "
    return "✓ fits so far " if progress.end is End.TIME else "~ fits so far "


def steady_words(progress: Progress) -> str:
    """For how many steps memory was steady; nothing for a run that ended by itself."""
    if not progress.is_cut or progress.steady < 2:
        return ""
    return f", steady for {_counted(progress.steady, progress)}"


def ending_words(progress: Progress) -> str:
    """What ended a run, beginning with a comma; nothing for one that ended by itself."""
    if not progress.is_cut:
        return ""
    of = f" of {progress.module}" if progress.module else ""
    after = f"after {_counted(progress.steps, progress)}{of}" if progress.steps else "before its first step"
    return f", {_HOW[progress.end]} {after}"


def unseen_words(progress: Progress) -> str:
    """What a run that was ended early leaves open."""
    if not progress.steps:
        return "No whole step was seen: a training step, or a forward pass where there is no optimizer."
    if progress.is_steady:
        return _LATER
    if progress.steps == 1:
        return f"One step does not tell whether memory is steady. {_LATER}"
    if progress.steady == 1:
        return f"Memory is not steady yet: the last step asked for other memory. {_LATER}"
    return f"Memory may not be steady yet: --steps steady waits for that. {_LATER}"


def unused_words(run: Run, verdict: Verdict) -> tuple[str, str]:
    """That a program never used a card, and why that may be."""
    if verdict.device.index == NO_CARD:
        return "the program saw no card", "CUDA_VISIBLE_DEVICES hides them all."
    if run.source is Source.CPU:
        return "the program made no tensors", "Nothing was metered, so nothing can be said of its memory."
    said = f"the program never used the card {verdict.device.gpu}{ending_words(run.progress)}"
    if run.progress.is_cut:
        return said, "It had not come so far yet, or it chose the CPU. Nothing can be said of its memory."
    return said, (
        "Either it chose the CPU (by an option or a setting of its own, such as --device or --no-cuda), or it ended "
        "before it came to the card. Nothing can be said of its memory."
    )


def _counted(count: int, progress: Progress) -> str:
    one, more = ("forward pass", "forward passes") if progress.unit is Unit.FORWARD else ("step", "steps")
    return f"{count:,} {one if count == 1 else more}"


def files_lines(changes: FileChanges | None, relative: Callable[[str], str]) -> list[str]:
    """A title and a line for each kind of change; empty where nothing changed.

    Args:
        changes: what happened; None where nobody looked.
        relative: shortens a path for people.
    """
    if changes is None or changes.writes not in _TITLES or not (changes.entries or changes.notes):
        return []
    lines = [_TITLES[changes.writes]]
    for kind, (did, what) in _KINDS.items():
        if entries := changes.of(kind):
            lines.append(_change_line(did, what, entries, relative))
    if changes.omitted:
        lines.append(f"and {counted(changes.omitted, 'change')} more")
    lines += changes.notes
    if changes.kept_at is not None:
        lines.append(f"kept in {relative(changes.kept_at)}")
    why = f" ({changes.reason})" if changes.reason else ""
    lines.append(f"the real files were protected by {changes.backend}{why}")
    return lines


def _change_line(did: str, what: str, entries: Sequence[FileChange], relative: Callable[[str], str]) -> str:
    size = sum(entry.size_bytes for entry in entries)
    total = f", {format_bytes(size)}" if size else ""
    named = ", ".join(relative(entry.path) for entry in entries[:_NAMED])
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return f"{did} {counted(len(entries), what)}{total}: {named}{more}"
