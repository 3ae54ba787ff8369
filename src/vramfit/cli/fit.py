"""``vramfit fit``: the largest batch, sequence or image that fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli import options
from vramfit.cli.fit_ranks import FitOptions, fit_ranks
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console
from vramfit.cli.program import planned_program
from vramfit.cli.run_parameters import with_run_options
from vramfit.errors import UsageError
from vramfit.options.declaration import SEVERAL_CARDS
from vramfit.options.run_options import RunOptions, given_options

if TYPE_CHECKING:
    pass

DOES_NOT_FIT = 3
_NOT_HERE = frozenset(
    {"gpus", "ranks", "rank", "device", "budget", "profile", "cudnn", "clock", "kernels", "time"}
    | {"writes", "writes_through", "need", "host_memory"}
)
"""Options of a run that this verb does not have; ``--ranks`` means something else here."""


@with_run_options(
    without=_NOT_HERE,
    card_follows=True,
    words={
        "gpu": 'The virtual card: "RTX 4090", a size such as 24GiB, or a TOML file.',
        "assume": "As for vramfit run: what to take for sizes that depend on data.",
    },
)
def fit_command(
    *,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT | FILE.py:WORKLOAD", help="The program, or a file and the Workload in it."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own.", show_default=False)
    ] = None,
    run: RunOptions,
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
            rich_help_panel=SEVERAL_CARDS,
        ),
    ] = None,
    most_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cards to try at most.", show_default="64", rich_help_panel=SEVERAL_CARDS
        ),
    ] = None,
    size: options.Sizes = None,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="Apply this plan first.")] = None,
    card: options.OnCard = None,
    at_least: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="A gate: end with exit code 3 if less than N fits."),
    ] = None,
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
        if run.gpu is None:
            raise UsageError("no card is given", "Choose one with --gpu NAME, such as --gpu H100")
        options.check_alloc_conf(run.alloc_conf)
        sought = FitOptions(ranks=ranks, largest=largest, at_least=at_least, most=most_ranks)
        fit_ranks(workload, arguments or [], run, sought, json)
    program = planned_program(workload, arguments, None, has_card=run.gpu is not None)
    if program:
        _refuse_workload_options(device=device, size=size, card=card)
        arguments = None
    of_script = {name: True for name in given_options(run) if name not in ("gpu", "alloc_conf")}
    _refuse_script_options(arguments, **of_script, most_ranks=most_ranks)
    room = options.room_of(run.gpu, device, budget, margin, host_budget, run.alloc_conf)
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
            program=program,
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


def _refuse_workload_options(**given: object) -> None:
    """Make sure that nothing is asked of a program that only a workload has."""
    for name, value in given.items():
        if value:
            raise UsageError(
                f"--{name} is for a workload", "Give the program's own arguments behind --, and leave it out"
            )


def _refuse_script_options(arguments: list[str] | None, **given: object) -> None:
    """Make sure that nothing is asked of a workload that only a script with ranks has."""
    for name, value in (("ARGS", arguments), *given.items()):
        if value is not None:
            option = name if name == "ARGS" else "--" + name.replace("_", "-")
            raise UsageError(f"{option} is for a script with --ranks", "Leave it out, or add --ranks auto")
