"""``vramfit fit``: the largest batch, sequence or image that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.options import AllocConf
from vramfit.cli.planning import (
    Budget,
    DeviceName,
    Gpu,
    HostBudget,
    JsonFile,
    Margin,
    Sizes,
    WorkloadName,
    room_of,
    showing,
    sizes_of,
)

DOES_NOT_FIT = 3


def fit_command(
    workload: WorkloadName,
    gpu: Gpu = None,
    device: DeviceName = None,
    budget: Budget = None,
    margin: Margin = None,
    host_budget: HostBudget = None,
    largest: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The size to make as large as possible.", show_default="the first"),
    ] = None,
    size: Sizes = None,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="Apply this plan first.")] = None,
    alloc_conf: AllocConf = None,
    json: JsonFile = None,
) -> None:
    """Find the largest batch size, or another size, with which a workload's step fits.

    Each try is a run on the virtual GPU with a model of its own. The exit code is 3 if not even 1 fits.
    """
    if json is not None and json != Path("-"):
        from vramfit.writing import check_writable

        check_writable(json)
    room = room_of(gpu, device, budget, margin, host_budget, alloc_conf)
    with showing() as progress:
        from vramfit.planner.run import fit_in_child

        found = fit_in_child(
            workload, room, size=largest, sizes=sizes_of(size or []), plan=plan, progress=progress
        )
    from vramfit.report.plan import print_fit, render_fit_json
    from vramfit.writing import write_text

    name = "the CPU" if room.gpu is None else room.gpu.name
    if json == Path("-"):
        typer.echo(render_fit_json(found, name), nl=False)
    else:
        from vramfit.cli.consoles import wide_console

        print_fit(found, name, wide_console())
        if json is not None:
            write_text(json, render_fit_json(found, name))
    if not found.value:
        raise typer.Exit(DOES_NOT_FIT)
