"""The documents hang together: a README of one sitting, links that lead somewhere, no page that nobody finds."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *PAGES,
    *(
        found
        for folder in ("benchmarks", "studies", "examples")
        for found in sorted((ROOT / folder).rglob("*.md"))
    ),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ANCHOR = re.compile(r'<a id="([^"]+)">')
HEADING = re.compile(r"#{1,6} +(.+)")


def prose(document: Path) -> Iterator[str]:
    """The lines of a document outside of its blocks of code, without what is marked as code in them."""
    fenced = False
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield line


def links(document: Path) -> Iterator[str]:
    """The targets of a document's links that stay within this repository."""
    for line in prose(document):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if "://" not in target and not target.startswith("mailto:"):
                yield target


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kept = (c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
    return "".join(kept).replace(" ", "-")


@cache
def anchors(document: Path) -> frozenset[str]:
    found: list[str] = []
    for line in prose(document):
        found += ANCHOR.findall(line)
        if heading := HEADING.fullmatch(line):
            name = slug(heading[1])
            again = sum(1 for one in found if re.fullmatch(re.escape(name) + r"(-\d+)?", one))
            found.append(f"{name}-{again}" if again else name)
    return frozenset(found)


def broken(document: Path) -> list[str]:
    wrong = []
    for target in links(document):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    assert not broken(document)


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `vramfit x`: a, b\n\n[a](#vramfit-x-a-b) [b](#b) [c](other.md) [d](https://example.com)\n"
        "```\n[e](nowhere.md)\n```\n",
        encoding="utf-8",
    )
    assert broken(page) == ["#b", "other.md"]


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [README]
    while waiting:
        document = waiting.pop()
        if document in reached or document.suffix != ".md" or not document.is_file():
            continue
        reached.add(document)
        waiting += [(document.parent / target.partition("#")[0]).resolve() for target in links(document)]
    assert not [page.name for page in PAGES if page not in reached]
