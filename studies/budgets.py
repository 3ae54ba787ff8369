"""Whether plans honour their budgets: random pairs of a workload and a budget, planned and then measured on the CPU.

    python studies/budgets.py                        # 100 pairs; goes on where an earlier run stopped
    python studies/budgets.py --count 20 --seed 7
    python studies/budgets.py --only gpt2 17         # pairs of an architecture, or of a number, anew
    python studies/budgets.py --write docs/budgets.md

Each pair is drawn from one of ten architectures (`random_budgets/workloads.py`): sizes of the model and of the batch,
how far results may differ, and a budget between a low peak (all blocks recomputed and, where the numerics allow it,
single examples) and that of the plain program. The plan is made for the CPU, saved, and read again in a process of its
own, where torch's profiler counts what several steps allocate. A budget is honoured if no moment of that run, the
making of the model included, has more allocated.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from random_budgets import processes
from random_budgets.table import Outcome, outcome, page, pairs_table, summary, terminal_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from study_files import keep, kept

RESULTS = Path(__file__).resolve().parent / ".budgets.jsonl"

HEAD = """With {versions}, one thread. `python studies/budgets.py --write docs/budgets.md` makes this page. Each
pair is a random workload and a random budget between *low*, the peak with all blocks recomputed and, where the numerics
allow it, single examples, and the peak of the plain program. The plan is made for the CPU, saved as TOML, read in a
process of its own and applied. *Measured* is the most that torch's profiler counts as allocated there, while the model
is made and in four steps from another seed; *planned* is the peak that the plan names; *own meter* is what
`vramfit.track` reports for two steps: it follows the tensors that the program sees, in blocks of 512 bytes, and not
what a kernel allocates for itself."""


def main(arguments: list[str] | None = None) -> int:
    """Try what the command line names; returns the exit code: 3 if a budget was not honoured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="pairs to draw")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn with")
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="architectures or numbers, tried anew")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page from what was found")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 240  # a file has no edge
    if options.count < 1:
        parser.error("--count has to be at least 1")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] = "1"
    numbers = _numbers(options, parser)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    known = _known(options.results, options.seed)
    wanted = [number for number in numbers if options.only or number not in known]
    if wanted:
        processes.preload()
    found = known | _try_all(wanted, options, console)
    results = [found[number] for number in numbers if number in found]
    if options.write is not None:
        written = [found[number] for number in sorted(found) if number < options.count]
        libraries = ("torch", "transformers", "monai")
        versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in libraries)
        options.write.write_text(page(written, versions, HEAD), encoding="utf-8")
    console.print(pairs_table(results))
    console.print(terminal_table(results))
    console.print(summary(results))
    bad = (Outcome.EXCEEDED, Outcome.FAILED)
    return 3 if any(outcome(result) in bad for result in results) else 0


def _numbers(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[int]:
    """The pairs that were asked for."""
    from random_budgets.pairs import draw
    from random_budgets.workloads import ARCHITECTURES

    numbers = list(range(options.count))
    if not options.only:
        return numbers
    chosen = set()
    for what in options.only:
        if what.isdecimal():
            chosen.add(int(what))
        elif what in ARCHITECTURES:
            chosen |= {n for n in numbers if draw(options.seed, n).architecture == what}
        else:
            parser.error(f"there is no architecture {what}; there are {', '.join(ARCHITECTURES)}")
    return sorted(chosen)


def _known(results: Path, seed: int) -> dict[int, dict[str, Any]]:
    """What earlier runs found of pairs of this seed, the latest of each."""
    return {result["number"]: result for result in kept(results) if result["seed"] == seed}


def _try_all(numbers: list[int], options: argparse.Namespace, console: Console) -> dict[int, dict[str, Any]]:
    from random_budgets.pairs import draw

    found: dict[int, dict[str, Any]] = {}
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Without a thread that refreshes it: processes are forked.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False
    ) as progress:
        task = progress.add_task("", total=len(numbers))
        try:
            for number in numbers:
                pair = draw(options.seed, number)
                tell = f"{number}: {pair.architecture}"
                progress.update(task, description=f"{tell}, planned", refresh=True)
                result = _trial(
                    pair,
                    lambda tell=tell: progress.update(task, description=f"{tell}, measured", refresh=True),
                )
                keep(options.results, result)
                found[number] = result
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("stopped; run again to go on")
    return found


def _trial(pair: Any, planned: Any) -> dict[str, Any]:
    """Plan a pair and measure the plan, each in a process of its own."""
    from random_budgets import trial

    began = time.perf_counter()
    result = asdict(pair)
    try:
        result |= processes.alone(trial.plan, pair)
        planned()
        if result["fits"]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "plan.toml"
                file.write_text(result["plan"], encoding="utf-8")
                result |= processes.alone(trial.measure, pair, file)
    except processes.TrialError as error:
        result["error"] = str(error)
    return result | {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    sys.exit(main())
