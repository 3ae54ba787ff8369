"""The tables of rows and of libraries, for a terminal and for docs/versions.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table
from study_files import markdown_table

from torch_rows.libraries import EXAMPLES, MONTHS, NEWER, Month, MonthOutcome, is_for
from torch_rows.outcome import Outcome
from torch_rows.rows import ROOT, Row

HEADS = ("torch", "build", "Python", "supported", "passed", "failed", "skipped", "seconds", "environment, s")
_RIGHT = HEADS[4:]
MOST_FAILURES = 20
"""Failed tests of a row that are named; its JSON file has them all."""

BEGIN = "<!-- rows: made by studies/versions.py -->"
END = "<!-- end of rows -->"


def cells(row: Row, outcome: Outcome | None, sources: str) -> tuple[str, ...]:
    """A row of the table; one of earlier sources has an asterisk."""
    first = (row.release, row.build.value, row.python, "yes" if row.supported else "no")
    if outcome is None:
        return (*first, *("not run",) * 3, "", "")
    if outcome.reason:
        return (*first, *("-",) * 3, "", "")
    earlier = "" if outcome.sources == sources else " *"
    figures = (f"{outcome.passed:,}{earlier}", f"{len(outcome.failures):,}", f"{outcome.skipped:,}")
    return (*first, *figures, f"{outcome.seconds:.0f}", f"{outcome.built:.0f}")


def terminal_table(found: Mapping[Row, Outcome], sources: str) -> Table:
    """For the terminal."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        shown.add_column(head, justify="right" if head in _RIGHT else "left")
    for row, outcome in found.items():
        style = None if outcome.good else "red" if row.supported else "yellow"
        shown.add_row(*cells(row, outcome, sources), style=style)
    return shown


def notes(found: Mapping[Row, Outcome], sources: str) -> list[str]:
    """What the table cannot hold: rows that were not run, and failures by name, in lines of Markdown."""
    lines = []
    for row, outcome in found.items():
        title = f"{row.release}, {row.build.value} build, Python {row.python}"
        if outcome.reason:
            lines.append(f"- {title}: {_plain(outcome.reason)}")
        elif outcome.failures:
            lines.append(f"- {title}: {len(outcome.failures)} failed")
            named = list(outcome.failures.items())[:MOST_FAILURES]
            lines += [f"  - `{name}`: {_plain(why)}" for name, why in named]
            if more := len(outcome.failures) - len(named):
                lines.append(f"  - and {more} more")
    if any(outcome.sources != sources and not outcome.reason for outcome in found.values()):
        lines.append("- \\* from an earlier state of the sources")
    return lines


def markdown(rows: tuple[Row, ...], found: Mapping[Row, Outcome], sources: str) -> str:
    """What stands between the two marks of docs/versions.md."""
    table = markdown_table(HEADS, [cells(row, found.get(row), sources) for row in rows], right=_RIGHT)
    below = notes(found, sources)
    return "\n".join([BEGIN, "", *table, "", *([*below, ""] if below else []), END])


LIBRARIES_BEGIN = "<!-- libraries: made by studies/versions.py -->"
LIBRARIES_END = "<!-- end of libraries -->"


def libraries_table(found: Mapping[str, MonthOutcome]) -> tuple[list[str], list[list[str]], list[str]]:
    """Heads, rows and notes: each library with its versions, and below it the peaks of its examples, month by month."""
    reasons: dict[str, int] = {}

    def cell(month: Month, example: str) -> str:
        outcome = found.get(month.name)
        if outcome is None or outcome.reason or not is_for(example, month):
            return "" if outcome is None else "-"
        ran = outcome.examples[example]
        if not ran.error:
            return f"{ran.reserved / 2**20:,.0f}"
        return f"fails ({reasons.setdefault(ran.error, len(reasons) + 1)})"

    rows = []
    for library, examples in EXAMPLES.items():
        rows.append([f"**{library}**", *(f"**{month.versions[library]}**" for month in MONTHS)])
        rows += [[example, *(cell(month, example) for month in MONTHS)] for example in examples]
    below = [f"- {month}: {_plain(one.reason)}" for month, one in found.items() if one.reason]
    below += [f"- {name} asks for {library} {since} or newer" for name, (library, since) in NEWER.items()]
    below += [f"- ({number}) {_plain(error)}" for error, number in reasons.items()]
    return ["", *(month.name for month in MONTHS)], rows, below


def libraries_markdown(found: Mapping[str, MonthOutcome]) -> str:
    """What stands between the two marks of the libraries in docs/versions.md."""
    heads, rows, below = libraries_table(found)
    table = markdown_table(heads, rows, right=heads[1:])
    return "\n".join([LIBRARIES_BEGIN, "", *table, "", *([*below, ""] if below else []), LIBRARIES_END])


def libraries_terminal(found: Mapping[str, MonthOutcome]) -> Table:
    """For the terminal."""
    heads, rows, _ = libraries_table(found)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        shown.add_column(head, justify="right" if head else "left")
    for row in rows:
        shown.add_row(*(text.strip("*") for text in row), style="bold" if row[0].startswith("*") else None)
    return shown


def write(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put a text in the place of what stands between its two marks."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text(before + text + after, encoding="utf-8")


def _plain(why: str) -> str:
    """A reason as Markdown, for readers elsewhere: without folders of this machine."""
    why = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", ".../", why.replace(f"{ROOT}/", ""))
    return why[:160].replace("<", "\\<").replace("|", "\\|").replace("*", "\\*")
