"""Results kept line by line as JSON, so that a run that was stopped goes on where it was. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.launch.tasks.task import Ending, TaskResult

Line = dict[str, Any]


def kept(file: Path) -> Iterator[Line]:
    """The results of earlier runs, without a line that was cut off in its middle."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        yield result


def keep(file: Path, result: Mapping[str, Any]) -> None:
    """Add a result at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")


def _line(result: TaskResult) -> Line | None:
    """A line of what was returned; what failed is tried again."""
    return {"task": result.key, "value": result.value} if result.ending is Ending.DONE else None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptResults:
    """A file of results.

    Attributes:
        file: the file, a line of JSON for each.
        line_of: the line of a result; None for a result that is not kept.
        key_of: the key of the task of a line.
        value_of: what its function returned.
    """

    file: Path
    line_of: Callable[[TaskResult], Line | None] = _line
    key_of: Callable[[Line], str] = lambda line: line["task"]
    value_of: Callable[[Line], Any] = lambda line: line["value"]

    def known(self) -> dict[str, TaskResult]:
        """Results of earlier runs by the keys of their tasks, the last of each."""
        return {
            key: TaskResult(key=key, ending=Ending.KEPT, value=self.value_of(line))
            for key, line in ((self.key_of(line), line) for line in kept(self.file))
        }

    def add(self, result: TaskResult) -> None:
        """Keep a result."""
        line = self.line_of(result)
        if line is not None:
            keep(self.file, line)
