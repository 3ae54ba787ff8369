"""``vramfit verify``: hold a plan against a run of its memory, and against the plain program's gradients and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import JsonFile, OnCard, Sizes, card_of, gpu_names, sizes_of, span
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console

BROKEN = 3


def verify_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="What vramfit plan wrote.")],
    workload: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:WORKLOAD", help="The workload.", show_default="the plan's own"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The card, such as a file that describes one.",
            show_default="the plan's own",
            autocompletion=gpu_names,
        ),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Run it before and after on the virtual GPU.")] = True,
    values: Annotated[bool, typer.Option(help="Compare gradients and losses on this CPU.")] = True,
    card: OnCard = None,
    size: Sizes = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the loss curve.")] = 50,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            help="For the loss curves, about: the batch is made smaller.",
            callback=span,
        ),
    ] = 120.0,
    json: JsonFile = None,
) -> None:
    """Check that a plan does what it says: its memory, and what it promises of gradients and losses.

    Memory is that of a run on the virtual GPU; where this machine has the plan's card, it is measured there as well,
    and so is the time of a step. The exit code is 3 if it does not.
    """
    check_outputs([("--json", json)])
    with showing() as progress:
        from vramfit.planner.planner_run import VerifyOptions, verify_in_child

        found = verify_in_child(
            plan,
            VerifyOptions(
                memory=memory,
                values=values,
                card=card,
                sizes=sizes_of(size or []),
                steps=steps,
                seconds=seconds,
            ),
            target=workload,
            gpu=card_of(gpu),
            progress=progress,
        )
    from vramfit.report import json_text, print_report

    print_result(
        json, lambda: json_text(found, ascii_only=True), lambda: print_report(found, console=wide_console())
    )
    if not found.passes:
        raise typer.Exit(BROKEN)
