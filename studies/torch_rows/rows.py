"""The rows: which release of torch, which build of it, and which Python; and which of them vramfit says it supports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


class Build(Enum):
    """What a wheel of torch was built for."""

    CPU = "CPU"
    CUDA = "CUDA"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One release of torch, in one build, on one Python."""

    release: str
    build: Build
    python: str

    @property
    def name(self) -> str:
        """As it is asked for, and as its folder is called: ``2.15.0-cuda-py3.13``."""
        return f"{self.release}-{self.build.value.lower()}-py{self.python}"

    @property
    def supported(self) -> bool:
        """Whether pyproject.toml lets this be installed."""
        torch, python = _supported()
        return torch.contains(self.release) and python.contains(self.python)


DEVELOPED = Row(release="2.13.0", build=Build.CPU, python="3.11")
"""What every change is tested with; the figures of others are compared with its own."""

ROWS = (
    DEVELOPED,
    *(
        Row(release=release, build=Build.CUDA, python="3.11")
        for release in ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
    ),
    *(Row(release="2.15.0", build=Build.CUDA, python=python) for python in ("3.12", "3.13", "3.14")),
)


def chosen(words: Sequence[str]) -> list[Row]:
    """The rows that are asked for by releases or names, in the order of the table; all where nothing is asked.

    Raises:
        ValueError: if a word is neither; says which there are.
    """
    words = [word for text in words for word in re.split(r"[,\s]+", text) if word]
    names = {word: [row for row in ROWS if word in (row.release, row.name)] for word in words}
    if unknown := [word for word, rows in names.items() if not rows]:
        known = ", ".join(row.name for row in ROWS)
        raise ValueError(f"no row {', '.join(unknown)}: name a release or one of {known}")
    return [row for row in ROWS if not words or any(row in rows for rows in names.values())]


@cache
def project() -> dict[str, Any]:
    """The project's own table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


@cache
def _supported() -> tuple[SpecifierSet, SpecifierSet]:
    wanted = (Requirement(text) for text in project()["dependencies"])
    torch = next(one.specifier for one in wanted if one.name == "torch")
    return torch, SpecifierSet(project()["requires-python"])
