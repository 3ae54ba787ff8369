"""``vramfit explain``: where the memory of a recorded run went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli.options import Page, Recording
from vramfit.cli.printing import STANDARD_OUTPUT, check_outputs, write_document
from vramfit.errors import TraceFormatError, UsageError

if TYPE_CHECKING:
    from vramfit.analysis import FragmentationCauses, Tolerance, Verdict
    from vramfit.report import Explanation

PROVEN_EVENTS = 200_000
"""Remedies for longer recordings are given without a replay that proves them: each would take seconds."""


def explain_command(
    file: Recording,
    device: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="The device; by default the one that ran out, else the fullest."
        ),
    ] = None,
    peaks: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many kinds of local peaks to tell of.")
    ] = 3,
    lower: Annotated[
        str,
        typer.Option(
            metavar="SHARE|SIZE",
            help='By how much each peak should be lower ("10%", "2GiB"): what would have to go?',
        ),
    ] = "10%",
    fragmentation: Annotated[
        bool | None,
        typer.Option(
            help="Tell why reserved memory is not used, and what would help; by default where it ran out.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the explanation as JSON; - for standard output."),
    ] = None,
    report: Page = None,
) -> None:
    """Explain a recorded run: what was alive at its peak, by category, module and line, and what would lower it."""
    from vramfit.report import print_report, to_json, write_page

    bound = _lower(lower)
    check_outputs((("--json", json), ("--report", report)))
    found = explain_file(file, device, most=peaks, lower=bound)
    wanted = found.run.oom is not None if fragmentation is None else fragmentation
    causes = _causes(found) if wanted else None
    if json is not None:
        told = {} if causes is None else {"fragmentation_causes": to_json(causes)}
        write_document(json, to_json(found) | told)
    if report is not None:
        write_page(report, found.run, found.verdict, root=Path.cwd())
    if json == STANDARD_OUTPUT:
        return
    from vramfit.console import SafeConsole

    console = SafeConsole()
    print_report(found, console=console, root=Path.cwd())
    if causes is not None:
        console.print()
        print_report(causes, console=console, root=Path.cwd())


def _causes(found: Explanation) -> FragmentationCauses | None:
    """Why the explained device reserves more than was requested; None, with a note, where that is unknown."""
    from vramfit.analysis import causes

    trace = found.run.trace
    try:
        return causes(trace, found.verdict.device.index, proven=len(trace) <= PROVEN_EVENTS)
    except TraceFormatError as error:
        typer.echo(f"note: the causes of fragmentation are not known: {error}", err=True)
        return None


def explain_file(file: Path, device: int | None, *, most: int, lower: Tolerance) -> Explanation:
    """Read a recording and explain one of its devices.

    Raises:
        TraceFormatError: the file cannot be read.
        UsageError: the run has no such device.
    """
    from vramfit.analysis import leaks, peaks, pool_uses, run_from_trace, verdict
    from vramfit.report import Explanation
    from vramfit.trace import read_any

    run = run_from_trace(read_any(file), name=file.name)
    judged = _for_device(verdict(run), device, file)
    index = judged.device.index
    if run.trace.is_state(index):
        row = judged.device.breakdown.moment.row
        return Explanation(run=run, verdict=judged, peaks=(), pools=pool_uses(run.trace, index, row))
    found = peaks(run.trace, index, most=most, share=lower.share or 1.0, size=lower.size or None)
    grown = leaks(run.trace, index) if found else None
    return Explanation(run=run, verdict=judged, peaks=found, leaks=grown)


def _for_device(judged: Verdict, device: int | None, file: Path) -> Verdict:
    """The verdict with the chosen device as the deciding one."""
    from dataclasses import replace

    known = [one.index for one in judged.devices]
    if device is None:
        return judged
    if device not in known:
        held = ", ".join(map(str, known))
        raise UsageError(f"{file} has no data for device {device}", f"Its devices are: {held}")
    if device == judged.device.index:
        return judged
    return replace(
        judged, critical=known.index(device), why=(), advice=(), moment=None, line=None, short_by=0
    )


def _lower(text: str) -> Tolerance:
    """By how much each peak should be lower: a share or a size."""
    from vramfit.analysis import Tolerance

    hint = 'Write it as a share such as "10%", or as a size such as "2GiB"'
    try:
        bound = Tolerance.parse(text)
    except UsageError:
        raise UsageError(f"--lower is {text!r}, neither a share nor a size", hint) from None
    if bound.share is None and bound.size <= 0:
        raise UsageError(f"--lower is {text!r}, nothing at all", hint)
    if bound.share is not None and not 0 < bound.share <= 1:
        raise UsageError(f"--lower is {text!r}, not a share above 0 and up to 100%", hint)
    return bound
