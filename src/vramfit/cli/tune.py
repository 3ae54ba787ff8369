"""``vramfit tune``: which allocator settings would have served a recording with the least memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli.options import Recording
from vramfit.cli.printing import check_outputs, print_result, wide_console

if TYPE_CHECKING:
    from vramfit.analysis import Tuning
    from vramfit.trace import MemoryTrace


def tune_command(
    file: Recording,
    device: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only this device; by default all of the recording.", min=0),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTINGS",
            help='Try only these, such as "max_split_size_mb:256"; may be given several times.',
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all that was tried as JSON; - for standard output."),
    ] = None,
) -> None:
    """Replay a recording under many allocator settings and say which to use.

    Every setting serves every request of the recording. The line to put into the shell comes first, then the evidence
    against the recorded settings, then traps to keep away from.
    """
    from vramfit.trace import read_any

    check_outputs([("--json", json)])
    tuning = _with_progress(read_any(file), device, settings or [])
    from vramfit.report import json_text, print_report

    print_result(json, lambda: json_text(tuning), lambda: print_report(tuning, console=wide_console()))


def _with_progress(trace: MemoryTrace, device: int | None, settings: list[str]) -> Tuning:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from vramfit.analysis import tune
    from vramfit.console import SafeConsole

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = SafeConsole(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        return tune(
            trace,
            device=device,
            settings=settings,
            progress=lambda share, conf: bar.update(task, completed=share, description=conf or "defaults"),
        )
