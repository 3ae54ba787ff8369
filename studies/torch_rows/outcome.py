"""What became of one row, kept as JSON so that the table has the rows of earlier runs too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_rows.rows import ROOT, ROWS, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one row.

    Attributes:
        torch: the version that torch says, with its build.
        passed, skipped: tests.
        failures: the tests that failed or ended in an error, with the first words of why.
        seconds: of the tests.
        built: seconds that the environment took.
        reason: why no tests were run; empty where they were.
        absent: whether that is for want of an interpreter.
        sources: a digest of what was tested.
    """

    torch: str = ""
    passed: int = 0
    skipped: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    built: float = 0.0
    reason: str = ""
    absent: bool = False
    sources: str = ""

    @property
    def good(self) -> bool:
        """Whether tests ran and none failed."""
        return not self.reason and not self.failures and self.passed > 0


def digest() -> str:
    """A digest of vramfit and its tests, to tell rows of this source from those of an earlier one."""
    found = hashlib.sha256()
    for folder in ("src", "tests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def save(folder: Path, row: Row, outcome: Outcome) -> None:
    """Keep what became of a row: written beside, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{row.name}.part"
    part.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    part.rename(folder / f"{row.name}.json")


def load(folder: Path, rows: Sequence[Row] = ROWS) -> dict[Row, Outcome]:
    """What became of rows, now or in earlier runs."""
    found = {}
    for row in rows:
        if (file := folder / f"{row.name}.json").is_file():
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            found[row] = Outcome(**values)
    return found
