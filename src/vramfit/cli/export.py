"""``vramfit export``: a recording in the forms that other programs read, each chosen by the name of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.trace import MemoryTrace


def export_command(
    file: Annotated[
        Path,
        typer.Argument(help="A trace (.vft) or a torch snapshot: pickle or JSON, gzipped or plain."),
    ],
    output: Annotated[
        list[Path],
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to; its ending tells the form. Give it several times for several forms.",
        ),
    ],
    device: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The device of a picture; by default the fullest."),
    ] = None,
) -> None:
    """Write a recording in other forms, by the ending of the file.

    .html a page; .svg or .png the timeline for a paper; .csv the timeline as a table; .perfetto.json for
    ui.perfetto.dev; .pickle a torch snapshot for pytorch.org/memory_viz; .json the report of vramfit run --json;
    .vft a trace.
    """
    from vramfit.cli.run import check_outputs
    from vramfit.trace import read_any

    writers = [(path, _writer(path)) for path in output]
    check_outputs(("--output", path) for path in output)
    trace = read_any(file)
    if device is not None and device not in (known := _devices(trace)):
        held = ", ".join(map(str, known)) or "none"
        raise UsageError(f"{file} tells nothing of device {device}", f"Its devices are: {held}")
    for path, write in writers:
        write(trace, path, _Request(name=file.name, device=device))
        typer.echo(f"{path}: {path.stat().st_size:,} bytes" if path.is_file() else str(path))


class _Request:
    """What more there is to know for a form: the name of the recording and the device of a picture."""

    def __init__(self, *, name: str, device: int | None) -> None:
        self.name = name
        self.device = device


_Writer = Callable[["MemoryTrace", Path, _Request], None]


def _writer(path: Path) -> _Writer:
    """The form that a file's name asks for.

    Raises:
        UsageError: none is known by it.
    """
    name = path.name.lower()
    for ending, write in _FORMS.items():
        if name.endswith(ending):
            return write
    raise UsageError(f"{path} does not say which form to write", f"End it in {', '.join(_FORMS)}")


def _devices(trace: MemoryTrace) -> list[int]:
    import numpy as np

    return sorted({device.index for device in trace.devices} | set(np.unique(trace.device).tolist()))


def _page(trace: MemoryTrace, path: Path, request: _Request) -> None:
    from vramfit.report import write_page

    write_page(path, trace, title=request.name, root=Path.cwd())


def _perfetto(trace: MemoryTrace, path: Path, _: _Request) -> None:
    from vramfit.report.perfetto import write_perfetto

    write_perfetto(trace, path)


def _report(trace: MemoryTrace, path: Path, request: _Request) -> None:
    from vramfit.analysis import run_from_trace, verdict
    from vramfit.report import render_json, write_text

    run = run_from_trace(trace, name=request.name)
    write_text(path, render_json(run, verdict(run)))


def _snapshot(trace: MemoryTrace, path: Path, _: _Request) -> None:
    from vramfit.trace import write_snapshot

    write_snapshot(trace, path)


def _trace(trace: MemoryTrace, path: Path, _: _Request) -> None:
    trace.save(path)


def _table(trace: MemoryTrace, path: Path, _: _Request) -> None:
    from vramfit.report.table_file import write_csv

    write_csv(trace, path)


def _svg(trace: MemoryTrace, path: Path, request: _Request) -> None:
    from vramfit.report import write_text
    from vramfit.report.drawing import to_svg
    from vramfit.report.timeline_picture import draw_timeline

    write_text(path, to_svg(draw_timeline(trace, _pictured(trace, request))))


def _png(trace: MemoryTrace, path: Path, request: _Request) -> None:
    from vramfit.report.drawing import to_png
    from vramfit.report.timeline_picture import draw_timeline
    from vramfit.writing import write_file

    image = to_png(draw_timeline(trace, _pictured(trace, request)))
    write_file(path, lambda stream: stream.write(image))


def _pictured(trace: MemoryTrace, request: _Request) -> int:
    """The device that is asked for, else the one with the most reserved bytes."""
    from vramfit.analysis import Measure, curves, lifetimes

    if request.device is not None:
        return request.device
    devices = _devices(trace) or [0]
    return max(devices, key=lambda index: curves(trace, lifetimes(trace, index)).peak(Measure.RESERVED))


_FORMS: dict[str, _Writer] = {
    ".html": _page,
    ".perfetto.json": _perfetto,
    ".json": _report,
    ".pickle": _snapshot,
    ".csv": _table,
    ".svg": _svg,
    ".png": _png,
    ".vft": _trace,
}
"""Endings, those that end like others first."""
