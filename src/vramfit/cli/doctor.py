"""``vramfit doctor``: what decides about memory on this machine, with a cure for each finding; or what feeds a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import span
from vramfit.cli.printing import apart_from_json, check_outputs, print_result, showing

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
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Measure num_workers and pin_memory of this DataLoader (or of the function that makes it) instead.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="Seconds of each of three rounds of each choice, with --loader.",
            min=0.01,
            callback=span,
        ),
    ] = 2.0,
) -> None:
    """Look at driver, cards, neighbours, torch, allocator settings, container and host: findings with their fixes.

    With --loader FILE.py:NAME it reads from a DataLoader of yours and tells what workers are worth to it.

    The exit code is 0 whatever is found, unless --strict is given.
    """
    from vramfit.console import SafeConsole
    from vramfit.doctor import Severity, diagnose, gather
    from vramfit.report import json_text, print_report

    check_outputs([("--json", json)])
    if loader is not None:
        _try_loader(loader, seconds, json)
        return
    progress = SafeConsole(stderr=True)
    with progress.status("looking at this machine") as status:
        facts = gather(timeout=timeout, say=lambda what: status.update(f"looking at {what}"))
    diagnosis = diagnose(facts)
    print_result(json, lambda: json_text(diagnosis), lambda: print_report(diagnosis, console=SafeConsole()))
    if strict and diagnosis.worst is Severity.ERROR:
        raise typer.Exit(STRICT_FAILURE)


def _try_loader(target: str, seconds: float, json: Path | None) -> None:
    from vramfit.console import SafeConsole
    from vramfit.report import json_text, print_report
    from vramfit.runtime.feeding.loader_trials import try_loader

    with apart_from_json(json), showing() as say:
        found = try_loader(target, seconds=seconds, say=say)
    print_result(json, lambda: json_text(found), lambda: print_report(found, console=SafeConsole()))
