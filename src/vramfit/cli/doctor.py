"""``vramfit doctor``: what decides about memory on this machine, with a cure for each finding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import span
from vramfit.cli.printing import check_outputs, print_result

STRICT_FAILURE = 3


def doctor_command(
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write facts and findings as JSON; - for standard output."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any finding is an error.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="Seconds that the driver and torch may each take to answer.",
            min=1.0,
            callback=span,
        ),
    ] = 60.0,
) -> None:
    """Look at driver, cards, neighbours, torch, allocator settings, container and host: findings with their fixes.

    The exit code is 0 whatever is found, unless --strict is given.
    """
    from vramfit.console import SafeConsole
    from vramfit.doctor import Severity, diagnose, gather
    from vramfit.report import json_text, print_report

    check_outputs([("--json", json)])
    progress = SafeConsole(stderr=True)
    with progress.status("looking at this machine") as status:
        facts = gather(timeout=timeout, say=lambda what: status.update(f"looking at {what}"))
    diagnosis = diagnose(facts)
    print_result(json, lambda: json_text(diagnosis), lambda: print_report(diagnosis, console=SafeConsole()))
    if strict and diagnosis.worst is Severity.ERROR:
        raise typer.Exit(STRICT_FAILURE)
