"""``vramfit fit``: the largest batch, sequence or image that fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli import options
from vramfit.cli.fit_ranks import FitOptions, fit_ranks
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console
from vramfit.cli.ranks import PANEL, PerNode
from vramfit.errors import UsageError
from vramfit.launch.limits import limits_from
from vramfit.virtual.data_dependent.assume import Assume, assumption

if TYPE_CHECKING:
    from vramfit.virtual.virtual_run import VirtualRun

DOES_NOT_FIT = 3


def fit_command(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:WORKLOAD", help="The file and the Workload in it; a script with --ranks."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own.", show_default=False)
    ] = None,
    gpu: options.Gpu = None,
    device: options.DeviceName = None,
    budget: options.Budget = None,
    margin: options.Margin = None,
    host_budget: options.HostBudget = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The size to make as large as possible; of a script an option of its own: batch-size.",
            show_default="the first",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N",
            help="Of a distributed script: look for the fewest cards, or with --largest for a value on N of them.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    per_node: PerNode = None,
    most_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cards to try at most.", show_default="64", rich_help_panel=PANEL
        ),
    ] = None,
    assume: Annotated[
        str | None,
        typer.Option(
            metavar=options.ASSUMED_FORM,
            help="As for vramfit run: what to take for sizes that depend on data.",
            show_default="upper",
            rich_help_panel=PANEL,
        ),
    ] = None,
    steps: options.Steps = None,
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

    With --ranks auto it is the fewest cards (1, 2, 4, 8, ...) on which a distributed script fits: vramfit fit train.py
    --gpu H100 --ranks auto -- ARGS. With --ranks 8 --largest batch-size, the largest value of an option of its own.
    """
    check_outputs([("--json", json)])
    if ranks is not None:
        sought = FitOptions(
            ranks=ranks, per_node=per_node, largest=largest, at_least=at_least, most=most_ranks
        )
        where = _where(gpu, alloc_conf, assume, steps)
        fit_ranks(workload, arguments or [], where, sought, json)
    _refuse_script_options(arguments, steps=steps, per_node=per_node, most_ranks=most_ranks, assume=assume)
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


def _where(gpu: str | None, conf: str | None, assume: str | None, steps: str | None) -> VirtualRun:
    """Where ranks of a script run.

    Raises:
        UsageError: no card is given, or an option is wrong.
    """
    from vramfit.gpus import find_gpu
    from vramfit.virtual.virtual_run import VirtualRun

    if gpu is None:
        raise UsageError("no card is given", "Choose one with --gpu NAME, such as --gpu H100")
    options.check_alloc_conf(conf)
    return VirtualRun(
        gpu=find_gpu(gpu),
        alloc_conf=conf,
        assume=assumption(Assume.UPPER.value if assume is None else assume).text,
        limits=limits_from(steps, None),
    )


def _refuse_script_options(arguments: list[str] | None, **given: object) -> None:
    """Make sure that nothing is asked of a workload that only a script with ranks has."""
    for name, value in (("ARGS", arguments), *given.items()):
        if value is not None:
            option = name if name == "ARGS" else "--" + name.replace("_", "-")
            raise UsageError(f"{option} is for a script with --ranks", "Leave it out, or add --ranks auto")
