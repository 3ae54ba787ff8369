"""Names that people use: what the package exports, and what the documents and the examples call by name."""

from __future__ import annotations

import builtins
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vramfit

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
# What follows a slash is the version of a JSON schema, whose name no module has.
NAME = re.compile(r"(?<![\w/.-])vramfit(?:\.[A-Za-z_]\w*)+(?!\w|/\d|\.\w)")
ERROR = re.compile(r"(?<![\w.])[A-Z]\w*Error\b")
PROGRAMS = {"vramfit.with_plan"}
"""Modules that are run by ``python -m``, and never imported."""
FILES = (".toml", ".py", ".json", ".html", ".vft", ".pickle")


def names_in(document: Path) -> Iterator[str]:
    for found in NAME.findall(document.read_text(encoding="utf-8")):
        if not found.endswith(FILES):
            yield found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_documents_name_can_be_imported(document: Path) -> None:
    for name in sorted(set(names_in(document))):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_errors_that_documents_name_are_known(document: Path) -> None:
    for name in set(ERROR.findall(document.read_text(encoding="utf-8"))):
        assert any(hasattr(home, name) for home in (vramfit, builtins, torch)), name


def test_names_are_found_at_all() -> None:
    found = {name for document in DOCUMENTS for name in names_in(document)}
    assert {
        "vramfit.track",
        "vramfit.check_leaks",
        "vramfit.LeakFoundError",
        "vramfit.report.render",
    } <= found


def test_names_of_one_part_can_be_used_after_importing_the_package_alone() -> None:
    named = sorted(
        {name for document in DOCUMENTS for name in names_in(document) if name.count(".") == 1} - PROGRAMS
    )
    assert "vramfit.techniques" in named
    lines = ["import vramfit", *named, "import sys", "print('torch' in sys.modules)"]
    assert subprocess.check_output([sys.executable, "-c", "\n".join(lines)], text=True) == "True\n"


def test_every_export_can_be_had() -> None:
    for name in vramfit.__all__:
        assert getattr(vramfit, name) is not None
    assert dir(vramfit) == sorted(vramfit.__all__)
    assert len(set(vramfit.__all__)) == len(vramfit.__all__) and "__version__" in vramfit.__all__


def test_none_of_them_is_imported_before_its_use() -> None:
    line = (
        "import sys, vramfit; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    )
    assert subprocess.check_output([sys.executable, "-c", line], text=True) == "[]\n"
