"""Which releases of torch, in which builds and on which Pythons, carry vramfit: its tests run in each.

    python studies/versions.py                            # every row: some 25 GB of environments, an hour
    python studies/versions.py --rows 2.14.1 2.15.0       # some
    python studies/versions.py --libraries                # examples with libraries of this year and of the last
    python studies/versions.py --write docs/versions.md   # and write the page's tables

A row is a release of torch, a build and a Python. Each has an environment of its own under build/versions, with all
other packages as constraints.txt pins them; in it the tests run that are marked `torch_versions`. An environment that
is there is used again. A Python that is not found is given by a variable: PYTHON_3_14=/path/to/python3.14.

With --libraries, an environment for each month has what was new then of the libraries that people have beside torch,
and runs their examples.

The exit code is 1 if tests of a supported row fail or its environment cannot be built, or if an example fails. A row
without an interpreter is named and counts as not run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch_rows import libraries, subset, table
from torch_rows.environments import CannotBuild, environment, of_month, of_row
from torch_rows.libraries import MONTHS, Month, MonthOutcome
from torch_rows.outcome import Outcome, digest, load, save
from torch_rows.pythons import NoPython, interpreter
from torch_rows.rows import DEVELOPED, ROOT, ROWS, Row, chosen

FOLDER = ROOT / "build" / "versions"
Told = Callable[[int], None]


def main(arguments: list[str] | None = None) -> int:
    """Try what the command line names; returns the exit code."""
    options = _options(arguments)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # a file has no edge
    try:
        return _libraries(options, console) if options.libraries else _rows(options, console)
    except KeyboardInterrupt:
        console.print("stopped; what was finished is kept")
        return 130


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[], metavar="ROW", help="releases or names of rows")
    parser.add_argument("--libraries", action="store_true", help="versions of libraries instead")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that run tests")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments and results are kept")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this page")
    options = parser.parse_args(arguments)
    try:
        options.rows = chosen(options.rows)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for row in options.rows:
            print(row.name if row.supported else f"{row.name} (not supported)")
        parser.exit()
    options.folder = options.folder.absolute()
    return options


def _progress() -> Progress:
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


# -- Releases of torch ---------------------------------------------------------------------------------------------


def _rows(options: argparse.Namespace, console: Console) -> int:
    sources = digest()
    tried: dict[Row, Outcome] = {}
    with _progress() as progress:
        for number, row in enumerate(options.rows, 1):
            task = progress.add_task(f"{number}/{len(options.rows)} {row.name}", total=100)
            told = lambda percent, task=task: progress.update(task, completed=percent)  # noqa: E731
            tried[row] = replace(_row(row, options, told), sources=sources)
            save(options.folder, row, tried[row])
            progress.remove_task(task)
            progress.console.print(_line(row, tried[row]), highlight=False)
    if options.write is not None:
        table.write(options.write, table.markdown(ROWS, load(options.folder), sources))
    console.print(table.terminal_table(tried, sources))
    for line in table.notes(tried, sources):
        console.print(line, markup=False, highlight=False)
    bad = [row for row, outcome in tried.items() if not outcome.good and not outcome.absent]
    return 1 if any(row.supported for row in bad) else 0


def _row(row: Row, options: argparse.Namespace, told: Told) -> Outcome:
    """What becomes of one row."""
    try:
        here = environment(of_row(row), interpreter(row.python), options.folder)
    except NoPython as error:
        return Outcome(reason=str(error), absent=True)
    except CannotBuild as error:
        return Outcome(reason=f"its environment cannot be built: {error}")
    if not row.supported and (said := subset.refusal(here.python)) is not None:
        return Outcome(torch=here.torch, built=here.seconds, reason=f"refused: {said}")
    outcome = subset.run(here.python, options.folder / f"{row.name}.xml", options.jobs, told)
    return replace(outcome, torch=here.torch, built=here.seconds)


def _line(row: Row, outcome: Outcome) -> str:
    if outcome.reason:
        return f"{row.name}: {outcome.reason}"
    return (
        f"{row.name}: {outcome.passed} passed, {len(outcome.failures)} failed, {outcome.skipped} skipped "
        f"in {outcome.seconds:.0f} s; environment {outcome.built:.0f} s"
    )


# -- Libraries -----------------------------------------------------------------------------------------------------


def _libraries(options: argparse.Namespace, console: Console) -> int:
    sources = digest()
    tried: dict[str, MonthOutcome] = {}
    with _progress() as progress:
        for month in MONTHS:
            task = progress.add_task(month.name, total=100)
            told = lambda percent, task=task: progress.update(task, completed=percent)  # noqa: E731
            tried[month.name] = replace(_month(month, options, told), sources=sources)
            libraries.save(options.folder, month, tried[month.name])
            progress.remove_task(task)
    if options.write is not None:
        text = table.libraries_markdown(libraries.load(options.folder))
        table.write(options.write, text, table.LIBRARIES_BEGIN, table.LIBRARIES_END)
    console.print(table.libraries_terminal(tried))
    for line in table.libraries_table(tried)[2]:
        console.print(line, markup=False, highlight=False)
    return 0 if all(outcome.good for outcome in tried.values()) else 1


def _month(month: Month, options: argparse.Namespace, told: Told) -> MonthOutcome:
    """What becomes of the examples with the libraries of a month, beside the torch that is developed with."""
    try:
        here = environment(of_month(month, DEVELOPED), interpreter(DEVELOPED.python), options.folder)
    except (NoPython, CannotBuild) as error:
        return MonthOutcome(reason=str(error))
    ran = libraries.run(month, here.python, options.folder / f"libraries-{month.name}.reports", told)
    return MonthOutcome(torch=here.torch, examples=ran)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the examples' arguments are those of the tests
    sys.exit(main())
