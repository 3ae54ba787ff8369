"""``vramfit diff``: two runs at their peaks, what grew and what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.printing import STANDARD_OUTPUT, check_outputs, write_document


def diff_command(
    before: Annotated[
        Path,
        typer.Argument(
            metavar="BEFORE", help="A trace (.vft), a torch snapshot, or a report of vramfit run --json."
        ),
    ],
    after: Annotated[
        Path, typer.Argument(metavar="AFTER", help="What to compare with it: any of these too.")
    ],
    device: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Only this device; by default all that both know."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the comparison as JSON; - for standard output."),
    ] = None,
) -> None:
    """Compare what two runs held at their peaks: what grew, what is new, by category, module and line."""
    from vramfit.analysis import diff_states, states
    from vramfit.report import print_report, to_json
    from vramfit.trace import read_actual

    check_outputs([("--json", json)])
    found = diff_states(states(read_actual(before)), states(read_actual(after)), device)
    if json is not None:
        write_document(json, to_json(found))
    if json != STANDARD_OUTPUT:
        from vramfit.console import SafeConsole

        print_report(found, console=SafeConsole(), root=Path.cwd())
