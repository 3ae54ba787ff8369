"""Peak memory against time: plans of vramfit beside every other way to recompute, on the same workloads.

    python studies/frontier.py [--only SUBJECT ...] [--kinds KIND ...] [--fresh] [--write docs/frontier.md]

The headline is GPT-2 small of transformers, batch 2 x 512, float32, without dropout, on the CPU. Others: uniform
checkpointing (all blocks, every k-th), torch's selective checkpointing with several policies, either with the loss in
chunks, too, torch.compile's activation memory budget from 0 to 1, and torch's auto-SAC. Plans are asked for at fixed
budgets. All are measured alike: the peak by torch's profiler, above parameters and gradients, which stay allocated
throughout; multiplications and additions by torch's formulas; the time by what each operation takes on a card.

Each row is worked out in a process of its own and kept under build/frontier at once: a run that was stopped goes on
where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frontier_parts import table
from frontier_parts.peers import AUTO_SAC
from frontier_parts.rows import Found, Kept, Row, budgeted, settings
from frontier_parts.subjects import Subject, subjects
from frontier_parts.worker import answer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vramfit.launch.tasks import Ending, Task, run_all

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "build" / "frontier" / "rows.jsonl"
SECONDS = 3600.0
"""Longest that one row may take before its process is ended."""

UNNAMED = "sample"
"""The subject that is tried only where it is named."""


IMPORTS = ("torch.profiler", "transformers", "vramfit.planner.planner_child", "vramfit.virtual.gpu")
ENVIRONMENT = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}


def worked_out(
    subject: Subject, rows: Iterable[Row], seconds: float, log: Path
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """What is found of each row, in turn; that its process ended or took too long is an answer too.

    Args:
        subject: whose rows.
        rows: each is asked for once the one before it was dealt with.
        seconds: the longest that one may take.
        log: a file for what libraries and the planner tell.
    """
    tasks = (Task(key=row.key, function=answer, arguments=(subject.name, row.key)) for row in rows)
    for result in run_all(tasks, seconds=seconds, imports=IMPORTS, environ=ENVIRONMENT, log=log):
        if result.ending is not Ending.STOPPED:
            yield Row.of(result.key), result.value if result.has_value else {"failed": result.failure}


def rows_of(subject: Subject, kept: Kept, kinds: Sequence[str]) -> Iterable[Row]:
    """All rows of a subject in turn; budgets are known once the plain program was measured."""
    plain, *others = settings(subject)
    yield plain
    found = kept.get(subject.name, plain)
    if found is None or found.peak is None:
        return
    for row in (*others, *budgeted(subject, found.peak)):
        if (not kinds or row.kind in kinds) and (row.kind != AUTO_SAC or solver_is_here()):
            yield row


def missing_rows(subject: Subject, kept: Kept) -> list[Row]:
    """What is not known of a subject yet."""
    return [row for row in rows_of(subject, kept, []) if kept.get(subject.name, row) is None]


def solver_is_here() -> bool:
    """Whether what torch's auto-SAC needs is installed."""
    return all(find_spec(name) is not None for name in ("pulp", "pwlf"))


def collect(wanted: Sequence[Subject], kept: Kept, options: argparse.Namespace, console: Console) -> None:
    """Work out what is not known yet."""
    columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for subject in wanted:
            task = progress.add_task(subject.name, total=None)
            missing = _missing(subject, kept, options.kinds, progress, task)
            log = options.results.with_suffix(".log")
            for row, value in worked_out(subject, missing, options.seconds, log):
                found = kept.add(subject.name, row, value)
                progress.print(told(found), style="dim", highlight=False)


def _missing(
    subject: Subject, kept: Kept, kinds: Sequence[str], progress: Progress, task: TaskID
) -> Iterator[Row]:
    """The rows that are to be worked out, as the progress comes to them."""
    for done, row in enumerate(rows_of(subject, kept, kinds)):
        total = len(list(rows_of(subject, kept, kinds)))
        progress.update(task, description=f"{subject.name}: {row.name}", completed=done, total=total)
        if kept.get(subject.name, row) is None:
            yield row


def told(found: Found) -> str:
    """A row in a line."""
    if found.peak is None:
        return f"{found.subject}: {found.row.name}: {found.value['failed']}"
    return (
        f"{found.subject}: {found.row.name}: {found.peak / (1 << 20):.1f} MiB, {found.flops / 1e9:.1f} GFLOP"
    )


def main(arguments: list[str] | None = None) -> int:
    """Work out what the command line names; returns the exit code: 3 if a plan is above its budget or beaten."""
    known = subjects()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="SUBJECT", choices=sorted(known), help=", ".join(known))
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", default=[], choices=table.KINDS, help=", ".join(table.KINDS)
    )
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the longest that a row may take")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="write the page, and FILE.svg beside it"
    )
    parser.add_argument("--table", action="store_true", help="work out nothing, show what is known")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 180  # a file has no edge
    if options.fresh:
        options.results.unlink(missing_ok=True)
    wanted = [known[name] for name in options.only or [name for name in known if name != UNNAMED]]
    kept = Kept(options.results)
    if not options.table:
        try:
            collect(wanted, kept, options, Console(stderr=True, width=None if console.is_terminal else 180))
        except KeyboardInterrupt:
            console.print("stopped; run again to go on")
    if not solver_is_here():
        console.print(
            "Auto-SAC is left out: it needs pulp and pwlf (pip install 'vramfit[frontier]')", markup=False
        )
    judged = [table.judge(subject, kept.of(subject.name), missing_rows(subject, kept)) for subject in wanted]
    for one in judged:
        table.show(one, console)
    if options.write is not None:
        table.write(options.write, judged)
    return 3 if any(one.falls_short for one in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
