"""Convolutional trainings that others measured on two cards: how far off is the prediction, and does its bar hold?

    python benchmarks/measured_by_others.py [--card 'RTX 3060'] [--only PATTERN ...] [--cudnn PATH|auto] [--rows]
        [--json FILE] [--jobs N] [--fresh]

Needs torchvision. ``measured_by_others.csv`` holds figures that the authors of xMem measured (their repository
Stone-ResearchLife/xMem, files ``plot/data/**/evaluation_result.json``, MIT licence, copyright 2025 Jiabo Shi), copied
figure by figure: the most memory in use according to NVML, less its first sample; see NOTE [The first sample] in
comparing/trainings.py. Programs and settings are in benchmarks/README.md. A finished training is kept under
build/measured-by-others by the content that it depends on, and not worked out again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from comparing.results import Results
from comparing.trainings import KEPT, MeasuredTraining, chosen, work_out

from vramfit.cudnn.found_library import find_cudnn
from vramfit.errors import VramfitError
from vramfit.units import MIB


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", action="append", help="of these cards (default: both)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs by their names in the data")
    parser.add_argument(
        "--cudnn", default="none", metavar="PATH", help="an installed cuDNN to be asked, or auto"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the trainings there too")
    parser.add_argument("--rows", action="store_true", help="print every training")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (1)")
    parser.add_argument("--fresh", action="store_true", help="work out again what is finished")
    parser.add_argument("--results", type=Path, default=KEPT, metavar="DIR", help="finished trainings")
    options = parser.parse_args(arguments)
    if find_spec("torchvision") is None:
        sys.exit("the networks are torchvision's, which is not installed\nTry: pip install torchvision")
    try:
        if options.cudnn != "none":
            find_cudnn(options.cudnn)
    except VramfitError as error:
        sys.exit(f"{error.message}\nTry: {error.hint or 'another --cudnn'}")
    lines = list(chosen(options.card, options.only))
    kept = Results(folder=options.results, fresh=options.fresh)
    rows = []
    for row in work_out(lines, kept, options.cudnn, options.jobs):
        rows.append(row)
        if options.rows:
            print(told(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n".join(table(rows)))
    return 0


def told(row: MeasuredTraining) -> str:
    """A training in words."""
    least, most = (row.predicted - row.below) // MIB, (row.predicted + row.above) // MIB
    where = " ran out" if row.ran_out else "" if row.inside else " outside"
    return (
        f"{row.run:34} {row.card} measured {row.measured // MIB:6,}, with what stood before {row.whole // MIB:6,}; "
        f"predicted {row.predicted // MIB:6,} [{least:,}, {most:,}] {row.error:+.1%}{where}"
    )


def table(rows: Sequence[MeasuredTraining]) -> Iterator[str]:
    """Per card and in all: errors, bars, and how many lie within."""
    yield (
        "| card | trainings | median error | worst | ran out | outside the bar | as they stand "
        "| median width | widest |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    cards = list(dict.fromkeys(row.card for row in rows))
    for name, part in [(card, [row for row in rows if row.card == card]) for card in cards] + [("all", rows)]:
        if part:
            errors = [abs(row.error) for row in part]
            widths = [row.width for row in part]
            yield (
                f"| {name} | {len(part)} | {statistics.median(errors):.2%} | {max(errors):.1%} "
                f"| {sum(row.ran_out for row in part)} | {sum(not row.inside for row in part)} "
                f"| {sum(not row.plainly_inside for row in part)} "
                f"| {statistics.median(widths):.1%} | {max(widths):.1%} |"
            )


if __name__ == "__main__":
    sys.exit(main())
