"""``vramfit plan``: the cheapest set of techniques with which a workload stays within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli import options
from vramfit.cli.printing import check_outputs, print_result, showing, wide_console
from vramfit.cli.program import planned_program
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.planner.planner_job import MemoryBudget
    from vramfit.planner.planner_run import Planned

DOES_NOT_FIT = 3
INTERRUPTED_CODE = 130
"""As a shell gives it for a program that Ctrl-C ended."""


def plan_command(
    workload: options.WorkloadOrScript = None,
    arguments: options.ScriptArguments = None,
    module: options.Module = None,
    gpu: options.Gpu = None,
    device: options.DeviceName = None,
    budget: options.Budget = None,
    margin: options.Margin = None,
    host_budget: options.HostBudget = None,
    size: options.Sizes = None,
    numerics: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", help="How far results may differ: bitwise, rounding, precision or approximate."
        ),
    ] = "rounding",
    objective: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="throughput, memory for the lowest peak, price for the cheapest card to rent (without --gpu), or "
            "a size to make as large as fits, such as batch_size.",
        ),
    ] = "throughput",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="TECHNIQUE", help="Choose among these alone. Several times for several."),
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="TECHNIQUE", help="Leave one out. Several times for several.")
    ] = None,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Show peak against step time too, and draw it.")
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="For one solution of the program.", callback=options.span
        ),
    ] = 10.0,
    search_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.1,
            callback=options.span,
            help="For the whole search: the best plan by then is taken.",
            show_default="as long as it takes",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Leave aside what earlier searches for the workload saw.")
    ] = False,
    alloc_conf: options.AllocConf = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write the plan.")
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Find the cheapest set of changes with which a program, or a workload, trains within a budget.

    The program is given as to vramfit run, and needs no edit: vramfit run --plan PLAN.toml runs it with the plan.

    Every candidate is applied and run on the virtual GPU: the plan's peak is that of a run. The exit code is 3 if
    nothing fits; what came closest is shown then. Ctrl-C ends the search with the best plan so far, which is written
    all the same; the exit code is 130 then.
    """
    _check(output, json, frontier, numerics)
    program = planned_program(workload, arguments, module, has_card=gpu is not None)
    if program:
        _check_for_program(size, device, objective)
    if objective == "price":
        room = _room_for_price(gpu or device or budget or margin, host_budget, alloc_conf)
    else:
        room = options.room_of(gpu, device, budget, margin, host_budget, alloc_conf)
    with showing() as progress:
        from vramfit.planner.planner_job import PlanOptions
        from vramfit.planner.planner_run import plan_in_child, plan_program

        asked = PlanOptions(
            sizes=options.sizes_of(size or []),
            numerics=numerics,
            objective=objective,
            allow=allow,
            forbid=forbid or [],
            frontier=frontier is not None,
            time_limit=time_limit,
            search_seconds=search_seconds,
        )
        if program:
            planned = plan_program(program, room, asked, progress=progress)
        else:
            assert workload is not None
            planned = plan_in_child(workload, room, asked, fresh=fresh, progress=progress)
    _tell(planned, output, json, frontier)
    if planned.failure is not None:
        raise planned.failure
    from vramfit.planner.search_clock import INTERRUPTED

    if planned.plan.solved.stopped == INTERRUPTED:
        raise typer.Exit(INTERRUPTED_CODE)


def _check_for_program(size: list[str] | None, device: str | None, objective: str) -> None:
    """Refuse what only a workload has.

    Raises:
        UsageError: sizes, the CPU, or an objective that varies a size or the card.
    """
    if size:
        raise UsageError(
            "--size is for a workload", "Give the program its own arguments: train.py --batch-size 8"
        )
    if device is not None:
        raise UsageError("--device is for a workload", "Choose a virtual card: --gpu NAME")
    if objective not in ("throughput", "memory"):
        raise UsageError(
            f"--objective {objective} is for a workload",
            "Take throughput or memory; vramfit fit finds the largest batch of a program",
        )


def _room_for_price(given: str | None, host_budget: str | None, alloc_conf: str | None) -> MemoryBudget:
    from vramfit.planner.planner_job import MemoryBudget, budget_for_any_card

    if given is not None:
        raise UsageError(
            f"the objective price chooses the card, and {given} was given",
            "Leave --gpu, --device, --budget and --margin out, or take another objective",
        )
    host_bytes = options.size_of("--host-budget", host_budget, least=0)
    return budget_for_any_card(MemoryBudget(gpu=None, host_bytes=host_bytes, alloc_conf=alloc_conf))


def _check(output: Path | None, json: Path | None, frontier: Path | None, numerics: str) -> None:
    from vramfit.techniques import Numerics

    Numerics.parse(numerics)
    if frontier is not None and frontier.suffix != ".svg":
        raise UsageError(f"--frontier {frontier} is not an SVG file", "Give it a name that ends in .svg")
    check_outputs((("-o", output), ("--json", json), ("--frontier", frontier)))


def _tell(planned: Planned, output: Path | None, json: Path | None, frontier: Path | None) -> None:
    from vramfit.planner.reports.plan import render_frontier_svg
    from vramfit.report import json_text, print_report
    from vramfit.writing import write_text

    plan = planned.plan
    if output is not None and planned.failure is None:
        plan.save(output)
    print_result(
        json,
        lambda: json_text(plan, planned.frontier, ascii_only=True),
        lambda: print_report(plan, planned.frontier, console=wide_console()),
    )
    if frontier is not None:
        write_text(frontier, render_frontier_svg(plan, planned.frontier))
