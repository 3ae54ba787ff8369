"""What several studies write: results kept line by line, so that a stopped run goes on, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vramfit.launch.tasks.kept_results import keep, kept

__all__ = ["keep", "kept", "markdown_table"]


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> list[str]:
    """The lines of a table whose columns named in ``right`` are aligned to the right."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "|".join("---:" if head in right else "---" for head in heads) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return lines
