"""``vramfit fit``: the largest batch, sequence or image that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli import options
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console

DOES_NOT_FIT = 3


def fit_command(
    workload: options.WorkloadName,
    gpu: options.Gpu = None,
    device: options.DeviceName = None,
    budget: options.Budget = None,
    margin: options.Margin = None,
    host_budget: options.HostBudget = None,
    largest: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The size to make as large as possible.", show_default="the first"),
    ] = None,
    size: options.Sizes = None,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="Apply this plan first.")] = None,
    card: options.OnCard = None,
    at_least: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="A gate: end with exit code 3 if less than N fits."),
    ] = None,
    alloc_conf: options.AllocConf = None,
    json: options.JsonFile = None,
) -> None:
    """Find the largest batch size, or another size, with which a workload's step fits.

    Each try is a run on the virtual GPU with a model of its own; what was found is run on the card too where this
    machine has one of that kind. The exit code is 3 if not even 1 fits, or less than --at-least.
    """
    check_outputs([("--json", json)])
    room = options.room_of(gpu, device, budget, margin, host_budget, alloc_conf)
    with showing() as progress:
        from vramfit.planner.planner_run import fit_in_child

        found = fit_in_child(
            workload,
            room,
            size=largest,
            sizes=options.sizes_of(size or []),
            plan=plan,
            card=card,
            progress=progress,
        )
    from vramfit.report import json_text, print_report

    name = "the CPU" if room.gpu is None else room.gpu.name
    print_result(
        json,
        lambda: json_text(found, name, at_least, ascii_only=True),
        lambda: print_report(found, name, at_least, console=wide_console()),
    )
    if found.value < (at_least or 1):
        raise typer.Exit(DOES_NOT_FIT)
