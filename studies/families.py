"""Which model families of transformers run on the virtual GPU: trained, run without gradients, asked to generate.

    python studies/families.py                       # all; goes on where an earlier run stopped
    python studies/families.py --only llama t5       # some
    python studies/families.py --realistic           # a few at their real size
    python studies/families.py --write docs/families.md

Each family is built from a tiny configuration, twice: on the virtual GPU, and for real on the CPU. It runs if all
steps succeed and every output has the type and shape of the real one. A configuration that fails alike on the CPU says
nothing about the virtual GPU and is listed apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from study_files import keep, kept
from transformer_families.table import Entry, Status, judge, page, summary, terminal_table
from transformer_families.worker import attempt

from vramfit.launch.tasks import Ending, Task, run_all

HERE = Path(__file__).resolve().parent
RESULTS = HERE / ".families.jsonl"
SECONDS = 120
"""Longest that one half of a family may take before its process is ended."""

IMPORTS = ("transformers", "transformers.modeling_utils", "vramfit.virtual.gpu")
ENVIRONMENT = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}


def main(arguments: list[str] | None = None) -> int:
    """Try what the command line names; returns the exit code: 3 if a family failed on the virtual GPU alone."""
    parser = argparse.ArgumentParser(description="Try model families of transformers on the virtual GPU.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these families, tried anew")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--list", action="store_true", help="print the families")
    parser.add_argument("--realistic", action="store_true", help="some families at their real size instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page from what was found")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 180  # a file has no edge
    names = _names(options, parser)
    if options.list:
        for name in names:
            console.print(name, highlight=False)
        return 0
    if options.fresh:
        options.results.unlink(missing_ok=True)
    known = _known(options.results)
    wanted = [name for name in names if options.only or name not in known]
    found = known | _try_all(wanted, options.results, console)
    entries = [found[name] for name in names if name in found]
    if options.write is not None:
        options.write.write_text(_page(found), encoding="utf-8")
    console.print(terminal_table(entries))
    console.print(summary(entries))
    return 3 if any(entry.status is Status.FAILED for entry in entries) else 0


def _names(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    from transformer_families.kinds import families
    from transformer_families.realistic import REALISTIC

    names = [f"realistic:{name}" for name in REALISTIC] if options.realistic else list(families())
    if options.only:
        if unknown := [name for name in options.only if name not in names]:
            parser.error(f"there is no family {', '.join(unknown)}; --list names them")
        return list(options.only)
    return names


def _page(found: dict[str, Entry]) -> str:
    """The page from all that was found, whatever was asked for this time."""
    from transformer_families.kinds import families
    from transformer_families.realistic import REALISTIC

    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))
    tiny = [found[name] for name in families() if name in found]
    real = [found[name] for name in (f"realistic:{name}" for name in REALISTIC) if name in found]
    return page(tiny, real, versions)


def _known(results: Path) -> dict[str, Entry]:
    """What earlier runs found."""
    entries = (judge(answers["virtual"], answers["cpu"]) for answers in kept(results))
    return {entry.family: entry for entry in entries}


def _tasks(names: list[str]) -> Iterator[Task]:
    """A family on the virtual GPU, and for real on the CPU."""
    for name in names:
        for side in ("virtual",) if name.startswith("realistic:") else ("virtual", "cpu"):
            yield Task(key=f"{side} {name}", function=attempt, arguments=(side, name))


def _try_all(names: list[str], results: Path, console: Console) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    answers: dict[str, Any] = {}
    last = {task.key.partition(" ")[2]: task.key for task in _tasks(names)}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=len(names))
            for result in run_all(_tasks(names), seconds=SECONDS, imports=IMPORTS, environ=ENVIRONMENT):
                side, _, name = result.key.partition(" ")
                progress.update(task, description=name)
                # A crash or a hang is an answer too.
                answers[side] = (
                    result.value if result.has_value else {"family": name, "build": result.failure}
                )
                if result.key == last[name] and result.ending is not Ending.STOPPED:
                    answers = {"cpu": None, **answers}
                    keep(results, answers)
                    found[name] = judge(answers["virtual"], answers["cpu"])
                    progress.advance(task)
                    answers = {}
    except KeyboardInterrupt:
        console.print("stopped; run again to go on")
    return found


if __name__ == "__main__":
    sys.exit(main())
