"""Figures that others measured and published: what each means, and what is predicted of the same program.

A recording shows every request; such a figure is one number, and what it counts differs from source to source. So a row
says what its figure means, and is judged by it and by the row's own error bar. Two files hold them:

* ``measured_by_others.toml``: an entry for each figure, with the program of ours that is run (`read_figures`).
* ``measured_by_others.csv``: trainings of convolutional networks, which share one program (`comparing.trainings`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparing import results
from comparing.results import Results
from comparing.rows import Meaning, MeasuredFigure, bars_of
from comparing.trainings import MeasuredTraining, chosen
from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.plain import from_plain
from vramfit.trace import Run
from vramfit.virtual.virtual_run import run_in_child

BENCHMARKS = Path(__file__).parents[1]
FIGURES = BENCHMARKS / "measured_by_others.toml"
XMEM = "Stone-ResearchLife/xMem, plot/data/**/evaluation_result.json"
NOT_ONE = "not predicted: the program ended with code {code}: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureEntry:
    """An entry of ``measured_by_others.toml``. Sizes are in bytes.

    Attributes:
        name: unique among all rows.
        source: where the figure was published: a repository and file, or an address.
        card: its name in the catalogue.
        torch: version it was measured with; empty where that is not told.
        meaning: what the figure counts.
        bytes: the figure; the least of what it may stand for where it was rounded.
        most_bytes: the most that it may stand for; 0 for the same.
        program: a script below benchmarks and its arguments, as python would be given them.
        total_bytes: memory that was seen on that very card; 0 for the catalogue's.
        alloc_conf: settings of the allocator.
        prints: whether the program asks the virtual GPU itself, about a part of what it does, and prints ``predicted``,
            ``below`` and ``above`` in bytes as JSON in its last line.
        needs: packages that the program imports; it is skipped where one is missing.
        note: what a reader should know of the row.
    """

    name: str
    source: str
    card: str
    meaning: Meaning
    bytes: int
    program: tuple[str, ...]
    torch: str = ""
    most_bytes: int = 0
    total_bytes: int = 0
    alloc_conf: str | None = None
    prints: bool = False
    needs: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureFile:
    """``measured_by_others.toml``: its entries are tables called ``figure``."""

    figure: tuple[FigureEntry, ...] = ()


def read_figures(file: Path = FIGURES) -> list[FigureEntry]:
    """The entries of a file.

    Raises:
        VramfitError: it cannot be read, names something twice, or an entry says something that cannot be.
    """
    try:
        entries = from_plain(tomllib.loads(file.read_text(encoding="utf-8")), FigureFile).figure
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are among the latter
        raise VramfitError(f"{file.name} cannot be read: {error}") from None
    seen: set[str] = set()
    for entry in entries:
        if (wrong := _wrong(entry, seen)) is not None:
            raise VramfitError(f"{file.name}: figure {entry.name!r} {wrong}")
        seen.add(entry.name)
    return list(entries)


def _wrong(entry: FigureEntry, seen: set[str]) -> str | None:
    if entry.name in seen:
        return "is there twice"
    if entry.bytes <= 0 or 0 < entry.most_bytes < entry.bytes:
        return "has no such range of bytes"
    if not entry.source:
        return "has no source"
    if not entry.program or not (BENCHMARKS / entry.program[0]).is_file():
        return f"names no program below {BENCHMARKS.name}"
    find_gpu(entry.card)
    return None


def predict_figure(entry: FigureEntry, kept: Results) -> MeasuredFigure:
    """Run the program of an entry on the virtual GPU of its card, unless that was done before."""
    row = MeasuredFigure(
        name=entry.name,
        source=entry.source,
        device=entry.card,
        torch=entry.torch,
        meaning=entry.meaning,
        least=entry.bytes,
        most=entry.most_bytes or entry.bytes,
        note=entry.note,
    )
    missing = [name for name in entry.needs if results.versions(name).endswith("absent")]
    if missing:
        return replace(row, reason=f"needs {', '.join(missing)}, which is not installed")
    program = BENCHMARKS / entry.program[0]
    key = results.digest(results.of_vramfit(), program, repr(entry), results.versions(*entry.needs))
    found = kept.get(f"figure-{entry.name}", key)
    if found is None:
        found = _prediction(entry, program)
        kept.put(f"figure-{entry.name}", key, found)
    return replace(row, **found)


def _prediction(entry: FigureEntry, program: Path) -> dict[str, Any]:
    """What a run adds to a row."""
    if entry.prints:
        return _printed([sys.executable, str(program), *entry.program[1:]])
    spec = find_gpu(entry.card)
    if entry.total_bytes:
        spec = replace(spec, total_bytes=entry.total_bytes)
    try:
        run = run_in_child(
            [str(program), *entry.program[1:]], RunOptions(gpu=spec, alloc_conf=entry.alloc_conf)
        )
    except VramfitError as error:
        return {"reason": error.message}
    if run.oom is not None:
        return {"ran_out": True, "reason": "it ran out of memory on the virtual card"}
    if run.exit_code:
        return {"reason": NOT_ONE.format(code=run.exit_code, error=run.error)}
    return judged(run, entry.meaning)


def _printed(command: Sequence[str]) -> dict[str, Any]:
    """What a program prints that asks the virtual GPU itself."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
        sizes = {name: int(found[name]) for name in ("predicted", "below", "above")}
    except (ValueError, KeyError, TypeError):
        told = (done.stderr.splitlines() or ["it printed no prediction"])[-1]
        return {"reason": NOT_ONE.format(code=done.returncode, error=told)}
    return sizes if not done.returncode else {"reason": NOT_ONE.format(code=done.returncode, error="")}


def judged(run: Run, meaning: Meaning) -> dict[str, Any]:
    """What a run says of a figure: the size that it counts, with the bar of that size."""
    device = run.devices[0]
    bars = bars_of(run)
    if meaning is Meaning.ALLOCATED:
        bar = bars["allocated"]
        return {"predicted": device.peak_allocated_bytes, "below": bar.below, "above": bar.above}
    bar = bars["reserved"]
    outside = device.context_bytes if meaning is Meaning.DEVICE else 0
    return {"predicted": device.peak_reserved_bytes + outside, "below": bar.below, "above": bar.above}


def figure_of(training: MeasuredTraining) -> MeasuredFigure:
    """The row of a training that the authors of xMem measured."""
    return MeasuredFigure(
        name=training.run,
        source=XMEM,
        device=training.card,
        torch="2.6 or 2.3",
        meaning=Meaning.DEVICE_LESS_FIRST,
        least=training.least,
        most=training.whole,
        predicted=training.predicted,
        below=training.below,
        above=training.above,
        ran_out=training.ran_out,
    )


def largest_of_each(lines: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of the trainings of each network on each card, the one of the largest batch: what `accuracy.py` runs unasked."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        key = line["model"], line["card"]
        if key not in found or int(line["batch"]) > int(found[key]["batch"]):
            found[key] = dict(line)
    return list(found.values())


def wanted_trainings(patterns: Sequence[str], *, every: bool) -> list[dict[str, str]]:
    """Lines of the trainings that are to be run: those of these names, else a selection or all of them."""
    lines = list(chosen(None, patterns or None))
    return lines if patterns or every else largest_of_each(lines)
