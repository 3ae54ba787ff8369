"""``vramfit export``: a recording in the forms that other programs read, each chosen by the name of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import Recording
from vramfit.cli.printing import check_outputs
from vramfit.errors import UsageError


def export_command(
    file: Recording,
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
    from vramfit.report.forms import Material, devices_of, write_as, writer_of
    from vramfit.trace import read_any

    for path in output:
        writer_of(path)
    check_outputs(("--output", path) for path in output)
    trace = read_any(file)
    if device is not None and device not in (known := devices_of(trace)):
        held = ", ".join(map(str, known)) or "none"
        raise UsageError(f"{file} has no data for device {device}", f"Its devices are: {held}")
    material = Material(source=trace, name=file.name, device=device, root=Path.cwd())
    for path in output:
        write_as(path, material)
        typer.echo(f"{path}: {path.stat().st_size:,} bytes" if path.is_file() else str(path))
