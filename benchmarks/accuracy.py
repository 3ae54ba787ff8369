"""How near predictions come to recordings of cards: every recording we hold, and other tools on the same rows.

    python benchmarks/accuracy.py [--only PATTERN ...] [--json FILE] [--no-peers] [--every-figure] [--jobs N] [--fresh]

Two kinds of recordings are compared. Those that others published (tests/data/traces) come with programs of ours that
reproduce them (recordings_models), or with the reason why there is none. Those below benchmarks/recordings were made on
cards by `benchmarks/record.py`; the very program that was recorded runs on the virtual GPU of that card. Peaks are
compared, and the streams of requests, one by one. Other tools predict the same programs: torch's MemTracker, the
calculation of ``accelerate estimate-memory``, and bytes per parameter (benchmarks/comparing/formula.py).

A third kind of evidence are figures that others measured and published, one number each (comparing/figures.py): the
table says what each counts, and whether it lies within the row's own error bar. Of the trainings that the authors of
xMem measured, one of each network and card is run unless ``--every-figure`` is given; they need torchvision.

A finished row is kept under build/accuracy by the content that it depends on, and not worked out again. Recordings
that the virtual GPU made in a card's place are shown apart with ``--recordings DIR``, and never count as evidence.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparing import asking, figures, predictions, tables, trainings
from comparing.results import Results
from comparing.rows import CARDS, MeasuredFigure, Origin, Row, Score, bar_scores
from recording import store
from rich.console import Console

from vramfit.errors import VramfitError
from vramfit.launch.tasks import mapped
from vramfit.writing import write_text

ROOT = Path(__file__).parents[1]
RECORDINGS = Path(__file__).parent / "recordings"
SCHEMA = 2


def find_recordings(folders: Sequence[Path]) -> list[store.Recording]:
    """Recordings of `record.py`: those that are kept with the benchmarks, and those of other folders.

    Raises:
        TraceFormatError: a file is damaged, or one that the virtual GPU made lies among those of cards.
    """
    kept = list(store.load_all(RECORDINGS)) if RECORDINGS.exists() else []
    for recording in kept:
        if recording.source is not store.Source.CARD:
            raise VramfitError(
                f"{recording.file} was made by the virtual GPU and lies among recordings of cards",
                "Remove it; --recordings DIR compares such files from elsewhere",
            )
    found = {recording.file.resolve(): recording for recording in kept}
    for folder in folders:
        if not folder.is_dir():
            raise VramfitError(f"there is no folder {folder}", "Give the folder that record.py wrote")
        found |= {recording.file.resolve(): recording for recording in store.load_all(folder)}
    return list(found.values())


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is wanted; all are without a pattern."""
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def work_out(
    options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[list[Row], list[MeasuredFigure]]:
    """Every wanted row: of recordings, and of figures that others measured."""
    kept = Results(folder=options.results, fresh=options.fresh)
    own = [r for r in find_recordings(options.recordings) if matches(r.name, options.only)]
    names = [name for name in predictions.published_names() if matches(name, options.only)]
    entries = [entry for entry in figures.read_figures() if matches(entry.name, options.only)]
    lines = figures.wanted_trainings(options.only, every=options.every_figure)
    if not own and not names and not entries and not lines:
        raise VramfitError(
            f"no recording is called {' or '.join(options.only)}", "Leave --only out to see all"
        )

    def finish(row: Row) -> Row:
        if options.peers:
            row = asking.ask_peers(row, kept, seconds=options.peer_seconds)
        say(f"{row.name} ({row.origin.value})")
        return row

    jobs = options.jobs
    first = mapped(finish, predictions.predict_published(names, kept), at_once=jobs)
    second = mapped(lambda recording: finish(predictions.predict(recording, kept)), own, at_once=jobs)
    rows = [*first, *second]
    measured = mapped(lambda entry: figures.predict_figure(entry, kept), entries, at_once=jobs)
    return rows, [*measured, *work_out_trainings(lines, options, say)]


def work_out_trainings(
    lines: Sequence[dict[str, str]], options: argparse.Namespace, say: Callable[[str], None]
) -> Iterator[MeasuredFigure]:
    """Rows of the trainings that the authors of xMem measured; none where torchvision is missing."""
    if not lines:
        return
    if find_spec("torchvision") is None:
        say(f"{len(lines)} trainings are left out: their networks are torchvision's, which is not installed")
        return
    kept = Results(folder=trainings.KEPT, fresh=options.fresh)
    for training in trainings.work_out(lines, kept, jobs=options.jobs):
        say(f"{training.run} ({Origin.MEASURED.value})")
        yield figures.figure_of(training)


def print_all(
    rows: Sequence[Row], measured: Sequence[MeasuredFigure], console: Console
) -> dict[str, list[Score]]:
    """All tables; returns the scores by kind."""
    for origin in Origin:
        tables.print_rows(console, rows, origin)
    tables.print_figures(console, measured)
    tables.print_bars(console, rows, measured)
    if line := tables.exactness(rows):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in remarks(rows):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    evidence = [row for row in rows if row.origin.is_evidence]
    scores = {}
    if evidence:
        scores["evidence"] = tables.print_scores(console, evidence, "All rows that a card made")
    if len(evidence) < len(rows):
        virtual = [row for row in rows if not row.origin.is_evidence]
        scores["virtual"] = tables.print_scores(console, virtual, tables.TITLES[Origin.VIRTUAL])
    return scores


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader must know: versions that differ, and what could not be measured."""
    here = version("torch")
    found = [
        f"Warning: recorded with torch {made}, predicted with torch {here}. Kernels differ between releases; run this "
        "with an interpreter that has the recorded one."
        for made in sorted({row.torch for row in rows if row.origin is Origin.CARD})
        if release(made) != release(here)
    ]
    if not any(row.origin is Origin.CARD for row in rows):
        found.append(
            "Not measured: no recording of a card of our own is among these rows (benchmarks/record.py makes them). So "
            "recurrent layers, most convolutions, training in mixed precision, fused optimizers, attention kernels and "
            "memory outside the allocator are not compared with a card here, other than by single figures of others."
        )
    releases = sorted(
        {row.torch for row in rows if row.stream is not None and row.origin is Origin.PUBLISHED}
    )
    if releases:
        found.append(
            f"The published recordings that are predicted are of torch {' and '.join(releases)}; our programs of them "
            f"spell out what those releases call, and predictions ran with torch {here}."
        )
    return found


def release(text: str) -> str:
    """``2.11`` of ``2.11.0+cu130``."""
    return ".".join(text.partition("+")[0].split(".")[:2])


def to_json(
    rows: Sequence[Row], measured: Sequence[MeasuredFigure], scores: dict[str, list[Score]]
) -> dict[str, Any]:
    """Everything the tables hold."""
    return {
        "schema": SCHEMA,
        "torch": version("torch"),
        "cards": list(CARDS),
        "remarks": remarks(rows),
        "rows": [row.to_dict() for row in rows],
        "measured_by_others": [row.to_dict() for row in measured],
        "bars": [s.to_dict() for s in bar_scores(rows, measured)],
        "scores": {
            kind: [{**asdict(s), "tool": s.tool.value} for s in found] for kind, found in scores.items()
        },
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names, * for any letters")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--recordings", type=Path, nargs="+", default=[], metavar="DIR", help="more folders of record.py"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the other tools out")
    parser.add_argument(
        "--peer-seconds",
        type=float,
        default=600,
        metavar="S",
        help="time for the other tools, each row (600)",
    )
    parser.add_argument(
        "--every-figure",
        action="store_true",
        help="all trainings that others measured, not one of each network",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows at a time (1)")
    parser.add_argument("--fresh", action="store_true", help="work out again what is finished")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "accuracy", metavar="DIR", help="finished rows"
    )
    return parser.parse_args()


def main() -> int:
    """Compare; exit code 2 for wrong input."""
    options = parse()
    progress = Console(stderr=True)
    console = Console()
    console.width = max(console.width, 170)  # the tables' own width, where the output is a file
    try:
        rows, measured = work_out(options, lambda text: progress.print(text, style="dim", highlight=False))
        scores = print_all(rows, measured, console)
        if options.json is not None:
            write_text(options.json, json.dumps(to_json(rows, measured, scores), indent=1) + "\n")
    except VramfitError as error:
        print(f"{error.message}. {error.hint or ''}".rstrip(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
