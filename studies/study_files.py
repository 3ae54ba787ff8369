"""What several studies write: results kept line by line, so that a stopped run goes on, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def kept(file: Path) -> Iterator[dict[str, Any]]:
    """The results of earlier runs, without a line that was cut off in its middle."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        yield result


def keep(file: Path, result: dict[str, Any]) -> None:
    """Add a result at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> list[str]:
    """The lines of a table whose columns named in ``right`` are aligned to the right."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "|".join("---:" if head in right else "---" for head in heads) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return lines
