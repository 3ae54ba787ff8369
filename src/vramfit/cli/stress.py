"""``vramfit stress``: a workload at changing sizes, up to where it no longer fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import AllocConf, WorkloadName, card_of, check_alloc_conf, gpu_names, size_of
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console
from vramfit.errors import UsageError

DOES_NOT_FIT = 3
FAILED = 1


def stress_command(
    workload: WorkloadName,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help='A virtual card: "RTX 4090", a size such as 24GiB, or a TOML file.',
            autocompletion=gpu_names,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu", help="A real device; cpu is metered and needs --budget.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that metered CPU may take, such as 2GiB.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Rounds of changing sizes; 0 finds the limits only.",
            show_default="4 times all sizes",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE[=RANGE]",
            help="A size to vary: batch_size, batch_size=1..64 or batch_size=1,2,4. Several times for several.",
        ),
    ] = None,
    alloc_conf: AllocConf = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JSON; - for standard output.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the rounds as a picture.")
    ] = None,
) -> None:
    """Find the largest sizes of a workload that fit, and whether its memory is steady while sizes change.

    The exit code is 3 if it does not fit at its usual sizes, and 1 if it fails there for another reason.
    """
    check_alloc_conf(alloc_conf)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot} is not an SVG file", "Give it a name that ends in .svg")
    check_outputs((("--json", json), ("--plot", plot)))
    from vramfit.stress import Vary, stress

    spec = card_of(gpu)
    with showing() as progress:
        report = stress(
            workload,
            gpu=spec,
            device=device,
            budget=size_of("--budget", budget),
            rounds=rounds,
            vary=[Vary.parse(text) for text in vary or []],
            alloc_conf=alloc_conf,
            progress=progress,
        )
    from vramfit.report import json_text, print_report, write_text

    print_result(json, lambda: json_text(report), lambda: print_report(report, console=wide_console()))
    if plot is not None:
        from vramfit.stress.stress_report import render_stress_svg

        write_text(plot, render_stress_svg(report))
    if not report.fits:
        from vramfit.stress.stability import RoundOutcome

        raise typer.Exit(DOES_NOT_FIT if report.baseline.outcome is RoundOutcome.OUT_OF_MEMORY else FAILED)
